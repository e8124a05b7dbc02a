"""docs/troubleshooting.md has only messages of the sources, and all messages about a state of the job.

A message on the page is ``**`text`**``, with "…" for each variable part. Messages about an argument of a call
(TypeError, ValueError and the like) explain themselves and may be missing on the page.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "troubleshooting.md"
_HOLE = "\0"
_PYTHON = [
    (path, ast.parse(path.read_text()))
    for folder in ("kvstore_plugin", "mykvrun", "build_backend")
    for path in sorted((_ROOT / folder).rglob("*.py"))
]
_CPP = [
    (path, path.read_text())
    for path in sorted((_ROOT / "csrc").rglob("*"))
    if path.suffix in (".cpp", ".h") and "testing" not in path.parts
]

# Of a call's argument, of a file's content that another message wraps, or of the program's end.
_ARGUMENT_ERRORS = [
    "ArgumentIndexError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "AttributeError",
    "NotImplementedError",
    "SystemExit",
    "TypeError",
    "UnpicklingError",
    "ValueError",
    "WrongParameters",
    "wrong_type",
    "wrong_value",
]
_LOGS = ("warning", "info", "warn", "say", "error")
# A text with this many words that is not a docstring is a message, even if another line raises or logs it.
_SENTENCE_WORDS = 10
# Arguments whose strings describe code: kvstore_plugin/compat/patches.py, mykvrun/command_line.py.
_DESCRIPTIONS = ("why", "does", "help", "description")

# Files whose messages need not be on the page.
_LEFT_OUT = (
    "kvstore_plugin/selftest/",  # each line of its report has its advice
    "kvstore_plugin/timeline/",  # its command names the file and what to do, and no job runs
    "kvstore_plugin/sharded_optimizer/safe_unpickler.py",  # reasons in "holds no optimizer states that can be read"
    "csrc/python/",  # arguments of the core, which kvstore_plugin checks before
    "csrc/mxnet/calls.cpp",  # the same
    "csrc/mxnet/gradient_norm.cpp",  # the same
    "csrc/compress/compressor.cpp",  # the same
    "csrc/compress/bits.cpp",  # the same
)
# Other texts that need not be there, by the reason.
_INTERNAL = {
    "describes a patch of MXNet": [
        "a Parameter of which all workers had values in a step",
        "A Trainer may be older than the import of this package",
    ],
    "part of a message on the page": [
        "or the build for your GPUs, such as mxnet-cu112",
        "a dict or a list of Parameters, such as net.collect_params(), not",
        "Open MPI has no libpmix.so loaded",
        "PMIx_Notify_event returned",
        "multiplies one momentum schedule by a factor",
        "adds noise from the random generator",
        "the parameter k of the compressor",
        ", the last at the learning rate … of a schedule",
        "Create the trainer before autograd.record()",
        "Fetch gradients where they are used",
        "Initialize the copy, with force_reinit=True",
        "it is in a bucket with gradients of another trainer",
        "Make all Trainers, and take their first steps, in the same order",
        "of the workers of this host, which have ended",
        ", on GPU",
        "The order of a list made from a set, or sorted by names with process counters, differs",
        "an error without a text",
        "a planted lack",
        "Make the same calls on all workers, none under `if rank == 0:`, and",
        "give all the same number of batches, as a DistributedSampler does",
        "Call save_states() and load_states() on all workers",
    ],
    "passes on the texts of other messages": ["mykv.run: …", "rank …:", "mykv: …", "…: the job ends."],
    "a wrong use of the core, which kvstore_plugin prevents": [
        "a timeline is being recorded already",
        "the timeline belongs to the process that this one is a fork of",
        "the array's shape is not known yet",
        "an array's address is not in the memory of its device",
        "NCCL has no",
        "the loaded MXNet library has no",
        "in … has no",
    ],
    "not for users": [
        "process rank [0-9]+ with PID",
        "unable to find the specified executable|",
        "numpy has no function … since numpy 1.20",
        "numpy.…, which raises an error",
        "no program: mykvrun",
        "examples:",
        "mpi4py.rc.initialize = False",
        "its reader does not read",
        "build the extension module for tests",
        "a planted lack",
    ],
}


def _text(node):
    """The text of an expression, with a hole for each variable part."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(?:\.\d)?[sdfg]|\{\w*(?:!r)?\}", _HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else _HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return _HOLE


def _name(function):
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _inside(nodes):
    return {inner for node in nodes for inner in ast.walk(node)}


def _python_texts(tree):
    """All texts of a module except docstrings, and those about a state of the job."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    nodes = list(ast.walk(tree))
    docstrings = _inside(
        node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    )
    composed = [node for node in nodes if isinstance(node, (ast.JoinedStr, ast.BinOp))]
    pieces = {piece for node in composed for piece in _inside([node]) - {node}}
    texts = {node: _text(node) for node in nodes if node not in docstrings | pieces}
    texts = {node: text for node, text in texts.items() if text.strip(_HOLE + " ")}
    about_arguments = _inside(call for call in raised if _name(call.func) in _ARGUMENT_ERRORS)
    about_arguments |= _inside(word.value for call in calls for word in call.keywords if word.arg in _DESCRIPTIONS)
    # Arguments that several calls share.
    pairs = [pair for node in nodes if isinstance(node, ast.Dict) for pair in zip(node.keys, node.values)]
    about_arguments |= _inside(value for key, value in pairs if getattr(key, "value", None) in _DESCRIPTIONS)
    told = [call for call in raised if _name(call.func) not in _ARGUMENT_ERRORS]
    told += [call for call in calls if _name(call.func) in _LOGS]
    wanted = {argument for call in told for argument in call.args}
    is_sentence = {node for node, text in texts.items() if len(text.split()) >= _SENTENCE_WORDS}
    return list(texts.values()), [texts[node] for node in (wanted | is_sentence) - about_arguments if node in texts]


def _cpp_text(statement):
    literals = list(re.finditer(r'"((?:[^"\\\n]|\\.)*)"', statement))
    text = ""
    for number, literal in enumerate(literals):
        between = statement[literals[number - 1].end() : literal.start()] if number else ""
        text += (_HOLE if between.strip() else "") + literal.group(1)
    return text


def _cpp_texts(code):
    """All texts of a file of C++, and those of its exceptions, without Python's ValueError."""
    code = re.sub(r"^\s*#include.*$|(?<!:)//.*$", "", code, flags=re.MULTILINE)
    statements = code.split(";\n")
    thrown = [
        statement for statement in statements if re.search(r"throw (?:Error|system_error)\(|return Error\(", statement)
    ]
    return [_cpp_text(one) for one in statements], [_cpp_text(one) for one in thrown]


def _collected():
    files = [(path, _python_texts(tree)) for path, tree in _PYTHON] + [(path, _cpp_texts(code)) for path, code in _CPP]
    told = [
        text
        for path, (_, texts) in files
        for text in texts
        if not str(path.relative_to(_ROOT)).startswith(_LEFT_OUT) and len(text.split()) > 1
    ]
    return [text for _, (texts, _) in files for text in texts], told


_TEXTS, _TOLD = _collected()
_ON_PAGE = [" ".join(text.split()) for text in re.findall(r"\*\*`(.+?)`\*\*", _PAGE.read_text(), re.DOTALL)]


def _holds(text, message):
    """Whether the fixed parts of a message are in a text in their order, none of them across a hole."""
    pattern = f".*{_HOLE}.*".join(re.escape(part.strip()) for part in message.split("…"))
    return re.search(pattern, text, re.DOTALL) is not None


def test_each_message_on_the_page_is_in_the_sources():
    assert not [message for message in _ON_PAGE if len(message.replace("…", "").split()) < 2], "too short to be found"
    assert not [message for message in _ON_PAGE if not any(_holds(text, message) for text in _TEXTS)]


def test_no_message_is_twice_on_the_page():
    assert len(_ON_PAGE) > 100
    assert sorted(set(_ON_PAGE)) == sorted(_ON_PAGE)


def test_each_message_of_a_state_is_on_the_page():
    internal = [text for texts in _INTERNAL.values() for text in texts]
    missing = [
        text.replace(_HOLE, "…")
        for text in _TOLD
        if not any(_holds(text, message) for message in [*_ON_PAGE, *internal])
    ]
    assert not missing, "\n".join(missing)


def test_each_internal_message_is_in_the_sources():
    for texts in _INTERNAL.values():
        for message in texts:
            assert any(_holds(text, message) for text in _TOLD), message
