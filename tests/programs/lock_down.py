"""A process that may not share memory, as in some sandboxes."""

from __future__ import annotations

import ctypes
import struct

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2  # from linux/prctl.h and linux/seccomp.h
_MEMFD_CREATE = 319  # its number on x86-64
_LOAD_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of BPF programs
_EPERM, _ALLOW = 0x00050001, 0x7FFF0000


def forbid_memfd() -> None:
    """Let memfd_create(2) fail with EPERM in this process from now on, by a filter of system calls (seccomp(2))."""
    lines = [
        (_LOAD_NUMBER, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 1, _MEMFD_CREATE),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program = b"".join(struct.pack("HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(program)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(Program(4, ctypes.addressof(buffer)))) == 0
