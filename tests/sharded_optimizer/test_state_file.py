"""Files of the optimizer's states: their format, how they are written and read, and the shards they are made of."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import subprocess
import sys

import kvstore_plugin as mykv
import mxnet as mx
import numpy as np
import pytest
from harness import marks
from harness.support import IS_2, MXNetError, array, clear_errors, dense_network, parameters
from kvstore_plugin.sharded_optimizer import atomic_file, state_file
from mxnet import autograd, gluon

_WAIT = {"MYKV_CHECKPOINT_WAIT_S": "1"}


def _fill(text: bytes):
    return lambda file: file.write(text)


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "file"
    atomic_file.write(path, _fill(b"one"))
    link = tmp_path / "link"
    link.symlink_to(path)
    atomic_file.write(link, _fill(b"two"))
    assert path.read_bytes() == b"two" and link.is_symlink()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.parametrize("where", ["no directory", "a directory", "a device", "a file in the place of a directory"])
def test_a_place_where_no_file_can_be_is_named_with_the_reason(tmp_path, where):
    (tmp_path / "file").write_bytes(b"old")
    path = {
        "no directory": tmp_path / "missing" / "file",
        "a directory": tmp_path,
        "a device": "/dev/full",
        "a file in the place of a directory": tmp_path / "file" / "file",
    }[where]
    with pytest.raises(OSError) as failure:
        atomic_file.write(path, _fill(b"new"))
    assert str(path) in str(failure.value) and "could not be written" in str(failure.value)
    assert (tmp_path / "file").read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_no_room_for_a_file_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="keeps its old content"):
            atomic_file.write(path, _fill(b"x" * 5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


@pytest.mark.ranks(1)
def test_states_of_a_trainer_without_the_store_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    net = dense_network(seed=0)
    trainer = mykv.DistributedTrainer(net.collect_params(), "adam")
    path = tmp_path / "states"
    trainer.save_states(path)
    before = path.read_bytes()
    pickle.loads(before)

    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer._updaters[0], "get_states", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.save_states(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["states"]


_WRITER = f"""
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("atomic_file", {atomic_file.__file__!r})
atomic_file = importlib.util.module_from_spec(spec)
spec.loader.exec_module(atomic_file)
"""


def test_a_process_that_is_killed_while_it_writes_leaves_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    program = (
        _WRITER
        + f"""
def killed(file):
    file.write(b"x" * 100_000)
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
atomic_file.write({str(path)!r}, killed)
"""
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -signal.SIGKILL
    if atomic_file._nameless(str(tmp_path), 0o600) is None:
        pytest.skip("a file system without files that have no name")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("named", [False, True])
def test_what_a_killed_process_has_left_is_removed_by_the_next_and_no_other_file(tmp_path, named):
    """One that was killed between the two names of its file, one that still writes, and a file of another name."""
    path = tmp_path / "file"
    program = _WRITER
    if named:
        program += "atomic_file._nameless = lambda *_: None\n"
    killed = program + "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    killed += f"atomic_file.write({str(path)!r}, lambda file: file.write(b'x'))\n"
    assert subprocess.run([sys.executable, "-c", killed], timeout=60).returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1 and not path.exists()
    (tmp_path / ".file.12.0123abcd.tmp.mine").write_bytes(b"")

    writing = program + "def fill(file):\n    print('go', flush=True)\n    file.write(sys.stdin.read().encode())\n"
    writing += f"atomic_file.write({str(path)!r}, fill)\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", writing], **pipes) as other:
        assert other.stdout.readline() == "go\n"
        atomic_file.write(path, _fill(b"first"))
        assert path.read_bytes() == b"first"
        other.communicate("second", timeout=60)
    assert other.returncode == 0 and path.read_bytes() == b"second"
    assert sorted(os.listdir(tmp_path)) == [".file.12.0123abcd.tmp.mine", "file"]


def _updater(**options):
    updater = mx.optimizer.get_updater(mx.optimizer.create("adam", **options))
    weight = mx.nd.array(np.ones((3, 4), "float32"))
    updater([0], [mx.nd.ones((3, 4))], [weight])
    updater.states["name"] = None
    return updater


@pytest.mark.parametrize("dump", [False, True])
def test_what_mxnet_saves_is_read_and_the_other_way_round(tmp_path, dump):
    updater = _updater(learning_rate=0.25, lr_scheduler=mx.lr_scheduler.FactorScheduler(3))
    path = tmp_path / "states"
    path.write_bytes(updater.get_states(dump_optimizer=dump))
    content = state_file.read(path)
    assert list(content.states) == [0, "name"] and content.states["name"] is None
    np.testing.assert_array_equal(content.states[0][0].asnumpy(), updater.states[0][0].asnumpy())
    assert (content.optimizer is not None) == dump
    with open(path, "wb") as file:
        state_file.write(file, content)
    other = mx.optimizer.get_updater(mx.optimizer.create("adam"))
    other.set_states(path.read_bytes())
    np.testing.assert_array_equal(other.states[0][1].asnumpy(), updater.states[0][1].asnumpy())
    if dump:
        assert other.optimizer.lr_scheduler.step == 3 and other.optimizer.num_update == updater.optimizer.num_update


class _Calls:
    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


def test_a_file_cannot_call_functions(tmp_path):
    flag = tmp_path / "called"
    for evil in (_Calls(os.mkdir, str(flag)), _Calls(eval, f"__import__('os').mkdir({str(flag)!r})"), _Calls(type, 1)):
        with pytest.raises(ValueError, match="'file' holds no optimizer states that can be read"):
            state_file.parse(pickle.dumps({0: evil}), "file")
    assert not flag.exists()


class _Lazy:
    """As a module that imports or loads what is asked for."""

    def __init__(self, asked: list):
        object.__setattr__(self, "asked", asked)

    def __getattribute__(self, name):
        object.__getattribute__(self, "asked").append(name)
        return self


class _Noted(mx.lr_scheduler.FactorScheduler):
    """A user's scheduler, with a class, a function and an attribute that has an effect inside."""

    made = ()

    def __init__(self, *arguments):
        type(self).made += (arguments,)
        super().__init__(3)

    class Inner(mx.lr_scheduler.FactorScheduler):
        pass


def test_a_name_in_a_file_is_not_followed_through_objects(monkeypatch):
    """To read an attribute can have an effect: ctypes.cdll loads a library of that name."""
    import ctypes

    from fuzz.parsers import without_effects
    from fuzz.seeds import NAMES_WITH_EFFECTS, named

    asked: list = []
    monkeypatch.setitem(sys.modules, "lazy", _Lazy(asked))
    monkeypatch.setattr(ctypes.LibraryLoader, "__getattr__", lambda self, name: asked.append(name))
    own = [(__name__, "_Noted.Inner.__init__"), (__name__, "_Noted.base_lr"), (__name__, "_Noted.Inner.no.more")]
    for name in (*NAMES_WITH_EFFECTS, ("lazy", "one.more"), ("lazy", "__class__"), *own):
        for protocol in (2, 4):
            with pytest.raises(ValueError, match="neither an array nor an optimizer"), without_effects():
                state_file.parse(named(*name, protocol), "file")
    assert asked == [] and "this" not in sys.modules


def test_a_file_makes_objects_of_the_users_classes_and_does_not_call_them():
    optimizer = mx.optimizer.create("sgd", lr_scheduler=_Noted.Inner(7))
    content = state_file.parse(pickle.dumps(({}, optimizer)), "file")
    assert type(content.optimizer.lr_scheduler) is _Noted.Inner and content.optimizer.lr_scheduler.step == 7
    before = _Noted.made
    with pytest.raises(ValueError, match="calls a function"):
        state_file.parse(f"c{__name__}\n_Noted\n(S'path'\ntR.".encode(), "file")
    assert _Noted.made == before
    made = f"c{__name__}\n_Noted\n)".encode() + b"\x81"
    assert pickle.loads(made + b".").__class__ is _Noted
    other = b"N}X\x09\x00\x00\x00__class__" + f"c{__name__}\n_Noted.Inner\n".encode() + b"s\x86b."
    with pytest.raises(ValueError, match="changes an attribute that is not a field"):
        state_file.parse(made + other, "file")


def test_a_key_without_end_is_refused():
    """Python's hash of a tuple in tuples has no limit, and overflows the stack of the process."""
    deep = b")" + b"\x85" * 200_000  # beyond 50,000 the hash overflows 8 MiB
    for evil in (
        b"}" + deep + b"Ns.",
        b"}(" + deep + b"Nu.",
        b"(" + deep + b"Nd.",
        b"\x8f(" + deep + b"\x90.",
        b"(" + deep + b"\x91.",
        b"cbuiltins\nset\n](" + deep + b"e\x85R.",
        b"ccollections\nOrderedDict\n](](" + deep + b"Nee\x85R.",
    ):
        with pytest.raises(ValueError, match="has a key that is not a plain value"):
            state_file.parse(evil, "file")


def _raw(shape, data: bytes, dtype: int = 0, device: int = 1) -> bytearray:
    """An array as MXNet saves it."""
    axes, magic = len(shape), 0xF993FACA if mx.util.is_np_shape() else 0xF993FAC9
    return bytearray(struct.pack(f"<Iii{axes}q3i", magic, 0, axes, *shape, device, 0, dtype) + data)


def _array_of(raw) -> bytes:
    """A file with an array of these bytes."""
    made = _Calls(None)
    made._call = (mx.nd.NDArray, (None,), {"handle": raw})
    return pickle.dumps({0: made})


def test_arrays_are_checked_before_mxnet_sees_them():
    right = state_file.parse(_array_of(_raw((2,), bytes(8))), "file").states[0]
    assert right.shape == (2,) and (right.asnumpy() == 0).all()
    size, kind = "more or fewer bytes than its shape says", "a type that is not known"
    for wrong, reason in (
        (_raw((2,), bytes(7)), size),
        (_raw((2,), bytes(9)), size),
        (_raw((1 << 40, 1 << 30), b""), size),
        (_raw((-1, -2), bytes(8)), kind),
        (_raw((2,), bytes(8), dtype=13), kind),
        (_raw((2,), bytes(8), device=99), "a device that is not known"),
        (_raw((2,), bytes(8))[:6], "unpack_from requires a buffer"),
        (b"", "unpack_from requires a buffer"),
        (None, "without content"),
        (5, "without content"),
    ):
        with pytest.raises(ValueError, match=f"'file' holds no optimizer states that can be read: .*{reason}"):
            state_file.parse(_array_of(wrong), "file")


def _nested(depth: int, width: int) -> list:
    return [_nested(depth - 1, width)] * width if depth else []


_ARRAY = b"cmxnet.ndarray.ndarray\nNDArray\n"


@pytest.mark.parametrize(
    "evil",
    [
        pytest.param(_ARRAY + b"(I1234567\ntR.", id="an array at an address"),
        pytest.param(_ARRAY + b"(Ntq\x00Rq\x01(dI0\nh\x01s.", id="an array without content"),
        pytest.param(_ARRAY + b"(NtR(lI1\ns.", id="an item of an array is set"),
        pytest.param(_ARRAY + b")\x81.", id="an array that is not made"),
        pytest.param(b"cmxnet.optimizer\nAdam\n(N}X\x06\x00\x00\x00updateNstb.", id="a class is changed"),
        pytest.param(b"cnumpy\ndtype\n(S'O'\nI00\nI01\ntR.", id="a dtype of pointers"),
        pytest.param(
            b"cnumpy\ndtype\n(S'V8'\nI00\nI01\ntR(I3\nS'|'\nN(S'a'\ntNI8\nI1\nI0\ntb.", id="a dtype with fields"
        ),
        pytest.param(b"(dr\xff\xff\xff\x7f.x", id="gigabytes of places for nothing"),
        pytest.param(b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f.", id="gigabytes of bytes for nothing"),
        pytest.param(pickle.dumps({0: _nested(15, 50)}), id="states in states without end"),
        pytest.param(pickle.dumps({0: _nested(100, 1)}), id="states in states too deep"),
        pytest.param(b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00idntR.", id="a codec"),
    ],
)
def test_a_file_does_nothing_that_states_do_not_need(evil):
    with pytest.raises(ValueError, match="'file' holds"):
        state_file.parse(evil, "file")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_states_of_every_protocol_are_read(protocol):
    updater = _updater(lr_scheduler=mx.lr_scheduler.FactorScheduler(3))
    updater.optimizer.extra = [np.float32(3), np.arange(6.0).reshape(2, 3), {1, 2}, type(None), np.int64, b"1", 2j]
    content = state_file.parse(pickle.dumps((updater.states, updater.optimizer), protocol), "file")
    np.testing.assert_array_equal(content.states[0][1].asnumpy(), updater.states[0][1].asnumpy())
    np.testing.assert_array_equal(content.optimizer.extra[1], updater.optimizer.extra[1])
    assert content.optimizer.extra[2:] == updater.optimizer.extra[2:] and content.optimizer.lr_scheduler.step == 3


def test_who_may_read_a_file_stays_as_it_is(tmp_path):
    path = tmp_path / "states"
    path.write_bytes(b"old")
    for mode in (0o600, 0o640, 0o644):
        path.chmod(mode)
        atomic_file.write(path, lambda file: file.write(b"new"))
        assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == mode


def test_damaged_files_are_refused():
    data = _updater().get_states(dump_optimizer=True)
    for length in [*range(0, len(data), max(1, len(data) // 60)), len(data) - 1]:
        with pytest.raises(ValueError, match="'file' holds"):
            state_file.parse(data[:length], "file")
    for other in (
        data + b"x",
        b"no pickle at all",
        pickle.dumps([1]),
        pickle.dumps(({}, 3)),
        pickle.dumps({1.5: None}),
        pickle.dumps({0: "text"}),
        pickle.dumps(({0: "text"}, mx.optimizer.create("sgd"))),
    ):
        with pytest.raises(ValueError, match="'file' holds"):
            state_file.parse(other, "file")


def _trainer(net, kind: str, name: str = "adam", **options):
    optimizer = mx.optimizer.create(name, learning_rate=0.01, **options)
    if kind == "distributed":
        return mykv.DistributedTrainer(net.collect_params(), optimizer, update_on_kvstore=True, reduce_method="sum")
    if kind == "plain":
        return gluon.Trainer(net.collect_params(), optimizer, kvstore=None)
    if IS_2:
        optimizer.aggregate_num = 1
    return gluon.Trainer(net.collect_params(), optimizer, kvstore=mx.kv.create("mykv"), update_on_kvstore=True)


def _steps(net, trainer, first: int, last: int, part: int, parts: int) -> None:
    for turn in range(first, last):
        data = np.random.RandomState(turn).uniform(-1, 1, (12, 60)).astype("float32")
        with autograd.record():
            loss = (net(array(data[part::parts])) ** 2).sum()
        loss.backward()
        trainer.step(12)
    mx.nd.waitall()


def _net():
    return dense_network(5, inputs=60, widths=(500, 7))


def _flat(net) -> np.ndarray:
    return np.concatenate([value.ravel() for _, value in sorted(parameters(net).items())])


def _set(net, values: np.ndarray) -> None:
    from harness.support import structure

    for _, parameter in sorted(structure(net).items()):
        size = int(np.prod(parameter.shape))
        parameter.set_data(array(values[:size].reshape(parameter.shape)))
        values = values[size:]


@pytest.mark.ranks(1, 2, 3, timeout=120)
@pytest.mark.parametrize("kind", ["distributed", "stock"])
@pytest.mark.parametrize("name, options", [("adam", {}), ("sgd", {"momentum": 0.9}), ("sgd", {})])
def test_training_goes_on_from_a_file_as_without_interruption(tmp_path, gather, rank, size, kind, name, options):
    """On as many workers, and in a Trainer without a store, whose own file is loaded in turn."""
    path = gather(str(tmp_path / "states"))[0]
    scheduled = dict(options, lr_scheduler=mx.lr_scheduler.FactorScheduler(2, 0.9, base_lr=0.01))
    net = _net()
    trainer = _trainer(net, kind, name, **scheduled)
    _steps(net, trainer, 0, 3, rank, size)
    trainer.save_states(path)
    saved = _flat(net)
    _steps(net, trainer, 3, 6, rank, size)
    wanted = _flat(net)

    again = _net()
    _set(again, saved)
    trainer = _trainer(again, kind, name, **options)
    trainer.load_states(path)
    _steps(again, trainer, 3, 6, rank, size)
    np.testing.assert_array_equal(_flat(again), wanted)

    alone = _net()
    _set(alone, saved)
    plain = _trainer(alone, "plain", name, **options)
    plain.load_states(path)
    own = str(tmp_path / "plain")
    plain.save_states(own)
    _steps(alone, plain, 3, 6, 0, 1)
    np.testing.assert_allclose(_flat(alone), wanted, atol=1e-6)

    back = _net()
    _set(back, saved)
    trainer = _trainer(back, kind, name, **options)
    trainer.load_states(gather(own)[0])
    _steps(back, trainer, 3, 6, rank, size)
    np.testing.assert_array_equal(_flat(back), wanted)


class _Halves(mx.lr_scheduler.LRScheduler):
    def __call__(self, number):
        return 0.02 * 0.5**number


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "kind", ["DistributedTrainer", "on the store", "stock", marks.long("stock on the store"), "reset_ctx"]
)
@pytest.mark.parametrize("how", ["adam", "schedule"])
def test_counts_go_on_where_each_worker_has_another_device(kind, how, tmp_path, rank, size, gather):
    """MXNet counts updates by the number of the device; the file has that of the worker that wrote it."""
    folder = gather(str(tmp_path))[0]
    data = np.random.RandomState(rank).uniform(-1, 1, (5, 6)).astype("float32")
    device = mx.cpu(0 if kind == "reset_ctx" else rank)
    on_store, is_stock = kind.endswith("store"), kind.startswith("stock")

    def made():
        net = gluon.nn.Dense(4, in_units=6, use_bias=False, weight_initializer=mx.init.Constant(0.5))
        net.initialize(ctx=device)
        if how == "schedule":
            optimizer = mx.optimizer.create("sgd", learning_rate=0.02, momentum=0.9, lr_scheduler=_Halves())
        else:
            optimizer = mx.optimizer.create("adam", learning_rate=0.02)
        if is_stock:
            return net, gluon.Trainer(net.collect_params(), optimizer, kvstore="mykv", update_on_kvstore=on_store)
        return net, mykv.DistributedTrainer(net.collect_params(), optimizer, update_on_kvstore=on_store)

    def train(net, trainer, where):
        for step in range(3):
            with autograd.record():
                loss = (net(array(data * (1 + step), ctx=where)) ** 2).sum()
            loss.backward()
            trainer.step(10 if is_stock else 5)
        mx.nd.waitall()

    net, trainer = made()
    train(net, trainer, device)
    weights = net.weight.data().asnumpy()
    if rank == 0 or on_store:
        trainer.save_states(f"{folder}/states")
    gather("the file is there")
    again, resumed = made()
    again.weight.set_data(array(weights, ctx=device))
    resumed.load_states(f"{folder}/states")
    gather("the states are loaded")
    where = mx.cpu(rank)
    if kind == "reset_ctx":
        again.weight.reset_ctx(where)
    train(again, resumed, where)
    train(net, trainer, device)
    np.testing.assert_array_equal(again.weight.data().asnumpy(), net.weight.data().asnumpy())
    assert len({one.tobytes() for one in gather(again.weight.data().asnumpy())}) == 1


@pytest.mark.ranks(3)
def test_a_process_set_without_rank_0_loads(tmp_path, gather, rank):
    path = gather(str(tmp_path / "states"))[0]
    mykv.init()
    later = mykv.add_process_set([1, 2])
    if rank > 0:
        net = _net()
        trainer = mykv.DistributedTrainer(net.collect_params(), "adam", process_set=later, update_on_kvstore=True)
        _steps(net, trainer, 0, 2, rank - 1, 2)
        saved = _flat(net)
        trainer.save_states(path)
        _steps(net, trainer, 2, 3, rank - 1, 2)
        wanted = _flat(net)
        _set(net, saved)
        trainer.load_states(path)
        _steps(net, trainer, 2, 3, rank - 1, 2)
        np.testing.assert_array_equal(_flat(net), wanted)
    mykv.remove_process_set(later)


@pytest.mark.ranks(2, 3, env=_WAIT)
def test_workers_that_do_not_call_are_named_and_all_go_on(tmp_path, gather, rank, size):
    path = gather(str(tmp_path / "states"))[0]
    net = _net()
    trainer = _trainer(net, "distributed")
    _steps(net, trainer, 0, 1, rank, size)
    for _ in range(2):
        if rank == 0:
            with pytest.raises(MXNetError, match=rf"had not called it: \[{', '.join(map(str, range(1, size)))}\]"):
                trainer.save_states(path)
            assert not os.path.exists(path)
        _steps(net, trainer, 1, 2, rank, size)
    trainer.save_states(path)
    assert state_file.read(path).optimizer is not None
    if rank != 0:
        with pytest.raises(MXNetError, match=r"had not called it: \[0"):
            trainer.load_states(path)
    gather("those have given up")
    trainer.load_states(path)
    _steps(net, trainer, 2, 3, rank, size)
    assert len({value.tobytes() for value in gather(_flat(net))}) == 1


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("kind", ["distributed", "stock"])
def test_what_fails_on_the_first_worker_fails_on_all_and_changes_nothing(tmp_path, gather, rank, size, kind):
    folder = gather(str(tmp_path))[0]
    net = _net()
    trainer = _trainer(net, kind)
    _steps(net, trainer, 0, 2, rank, size)
    good = os.path.join(folder, "good")
    trainer.save_states(good)
    bad = {name: os.path.join(folder, name) for name in ("truncated", "shape", "key", "kind", "empty")}
    if rank == 0:
        with open(good, "rb") as file:
            data = file.read()
        states, optimizer = pickle.loads(data)
        shape = {**states, 0: tuple(mx.nd.ones((2, 2)) for _ in states[0])}
        for name, content in {
            "truncated": data[:-100],
            "shape": pickle.dumps((shape, optimizer)),
            "key": pickle.dumps(({**states, 77: None}, optimizer)),
            "kind": pickle.dumps((states, mx.optimizer.create("sgd"))),
            "empty": pickle.dumps({}),
        }.items():
            with open(bad[name], "wb") as file:
                file.write(content)
    gather("the files are there")
    for path in (*bad.values(), os.path.join(folder, "absent")):
        with pytest.raises((OSError, ValueError) if rank == 0 else MXNetError) as failure:
            trainer.load_states(path)
        assert path in str(failure.value) and (rank == 0 or "rank 0" in str(failure.value))
    with pytest.raises(OSError if rank == 0 else MXNetError, match="could not be written"):
        trainer.save_states(os.path.join(folder, "no directory", "file"))
    _steps(net, trainer, 2, 4, rank, size)

    undisturbed = _net()
    trainer = _trainer(undisturbed, kind)
    _steps(undisturbed, trainer, 0, 4, rank, size)
    np.testing.assert_array_equal(_flat(undisturbed), _flat(net))


@pytest.mark.ranks(2)
def test_a_store_without_optimizer_has_no_states(rank, tmp_path):
    store = mx.kv.create("mykv")
    for call in (store.save_optimizer_states, store.load_optimizer_states):
        with pytest.raises(RuntimeError, match=r"no optimizer; call set_optimizer"):
            call(str(tmp_path / "file"))


@pytest.mark.ranks(3, long=(2,))
@pytest.mark.parametrize("by", ["distributed", "stock"])
def test_saving_on_one_worker_while_the_others_wait_in_another_call(by, tmp_path, rank, size):
    net = _net()
    trainer = _trainer(net, by)
    _steps(net, trainer, 0, 1, rank, size)
    with pytest.raises(MXNetError, match=r"is in barrier, but rank 0 is saving or loading .*on all workers, not under"):
        if rank == 0:
            trainer.save_states(str(tmp_path / "states"))
        else:
            mykv.barrier()
    clear_errors()
    if rank == 0:  # it had not come to the barrier, where it finds the error too
        with pytest.raises(MXNetError, match="is saving or loading"):
            mykv.barrier()
    mykv.barrier()
    _steps(net, trainer, 1, 2, rank, size)
    trainer.save_states(str(tmp_path / "states"))
