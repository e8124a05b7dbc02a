"""No function of the package, of its launcher or of csrc/ has more than 60 lines without its docstring.

The parser supports only the C++ style of this project: see `_cpp_functions`.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_MOST = 60
_CPP_TEXT = r'"(\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])\'(\\.|[^\'\\])\''  # 1'000 is no character
_GOES_ON = re.compile(r"\s*[,{]")  # after a brace


def _python_functions(source):
    """Name and lines of each function, its decorators and its docstring left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            has_text = isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str)
            docstring = first.end_lineno - first.lineno + 1 if has_text else 0
            yield node.name, node.end_lineno - node.lineno + 1 - docstring


def _blank(text):
    return re.sub(r"[^\n]", " ", text[0])


def _without_texts(source):
    """The source in the same lines, without comments, texts, characters and lines of the preprocessor."""
    source = re.sub(r"//[^\n]*|/\*.*?\*/|" + _CPP_TEXT, _blank, source, flags=re.DOTALL)
    return re.sub(r"^[ \t]*#(\\\n|[^\n])*", _blank, source, flags=re.MULTILINE)


def _cpp_functions(source):
    """Head and lines of each function with a body, from the line of its head to its last brace.

    Braces of namespaces, classes and enums are parsed inside. All others belong to a declaration, which ends with its
    last brace, unless a comma or another brace follows: those are initializers of a constructor.
    """
    source = _without_texts(source)
    scopes = []  # for each open brace: whether declarations stand in it
    begin = 0  # of the declaration
    for found in re.finditer(r"[{};]", source):
        place = found.start()
        if found[0] == "{":
            head = re.sub(r"template\s*<.*?>|alignas\([^()]*\)", "", source[begin:place])
            scopes.append("(" not in head and bool(re.search(r"\b(namespace|extern|class|struct|union|enum)\b", head)))
            is_between = all(scopes)
        elif found[0] == "}":
            was_scope = scopes.pop()
            is_between = all(scopes) and (was_scope or not _GOES_ON.match(source, place + 1))
            declaration = re.sub(r"^\s*(public|private|protected)\s*:(?!:)", "", source[begin : place + 1]).strip()
            head = " ".join(declaration.split("{")[0].split())
            if is_between and not was_scope and "(" in head:
                yield head, declaration.count("\n") + 1
        else:
            is_between = all(scopes)
        begin = place + 1 if is_between else begin


def test_the_parser_of_python():
    source = """
class Shape:
    @property
    def area(self):
        '''Square metres,
        not feet.'''
        def inner():
            return 1
        return inner()
    async def draw(self, a,
                   b): pass
"""
    assert sorted(_python_functions(source)) == [("area", 4), ("draw", 2), ("inner", 2)]


def test_the_parser_of_cpp():
    source = """
#define MAKE(name) \\
  void name() {    \\
  }
namespace {
constexpr int kMost = 3;
const std::map<int, int> table = {{1, 2}, {3, 4}};
enum class Kind { a, b };
template <class T>
T helper(T value) {
  if (value) { return "}"; }  // }
  return T{};
}
}  // namespace
template <class T>
struct alignas(64) Shape : Base<T> {
  int a = f();
  std::atomic<int> b{0};
 public:
  Shape(int a)
      : a_(a),
        b_{a} {
    struct Inner { int one; };
  }
  int one() const { return 1; }
};
void Shape::draw(char c = '{') {

}
extern "C" {
int last() {
  return 0;
}
}
"""
    found = [(re.sub(r"^.*?(\w+)\(.*", r"\1", head), lines) for head, lines in _cpp_functions(source)]
    assert found == [("helper", 5), ("Shape", 5), ("one", 1), ("draw", 3), ("last", 3)]


def test_no_function_is_longer():
    sizes = [
        (str(path.relative_to(_ROOT)), name, lines)
        for folders, endings, functions in (
            (("kvstore_plugin", "mykvrun"), ("*.py",), _python_functions),
            (("csrc",), ("*.h", "*.cpp"), _cpp_functions),
        )
        for folder in folders
        for ending in endings
        for path in sorted((_ROOT / folder).rglob(ending))
        for name, lines in functions(path.read_text())
    ]
    for known in ("run_elastic", "HostTable::arrive_locked", "Runtime::Runtime"):
        assert any(known in name for _, name, _ in sizes), f"{known} was not found"
    assert len(sizes) > 2500, f"only {len(sizes)} functions were found"
    long = [size for size in sizes if size[2] > _MOST]
    assert not long, f"file, function, lines: {long}"
