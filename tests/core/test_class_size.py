"""No class of csrc/ has more than 25 private methods or 20 data members.

The parser supports only the C++ style of this project. Declarations are split at semicolons and at bodies, after nested
bodies are dropped; a declaration with a parenthesis before `=` and `{` is a method, any other a data member. Types,
static constants, tables of function pointers and classes from macros are not counted.
"""

from __future__ import annotations

import re
from pathlib import Path

_CSRC = Path(__file__).parents[2] / "csrc"
_MOST_METHODS, _MOST_MEMBERS = 25, 20


def _without_texts(source):
    source = re.sub(r'"(\\.|[^"\\\n])*"', '""', re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL))
    source = re.sub(r"'(\\.|[^'\\])'", "0", source)
    return re.sub(r"^\s*#(\\\n|[^\n])*", "", source, flags=re.MULTILINE)


def _body(source, begin):
    """The text between the braces from `begin` onwards, with inner braces emptied."""
    depth, kept = 1, ""
    for character in source[begin + 1 :]:
        depth -= character == "}"
        if depth == 0:
            break
        if depth == 1:
            kept += {"{": "", "}": "{}"}.get(character, character)
        depth += character == "{"
    return kept


def _declarations(body):
    """The declarations, each with the access from the preceding label (None: the class's default)."""
    access = None
    for declaration in re.findall(r"(?:[^;{}]|\{\}(?=\s*[;,]))+?(?:;|\{\};?)", body):
        while label := re.match(r"\s*(public|private|protected)\s*:(?!:)", declaration):
            access, declaration = label[1], declaration[label.end() :]
        yield access, "" if declaration.strip(" \n;") == "{}" else declaration.strip(" \n;")


def _sizes(source):
    """Name, private methods and data members of each class."""
    source = _without_texts(source)
    for head in re.finditer(
        r"\b(class|struct)\s+(?:alignas\([^)]*\)\s*)?(\w+)(?:\s+final)?\s*(?::[^;{}()]*)?\{", source
    ):
        if source[: head.start()].rstrip().endswith("enum"):
            continue
        methods = members = 0
        for access, declaration in _declarations(_body(source, head.end() - 1)):
            while declaration != (shorter := re.sub(r"<[^<>]*>|alignas\([^()]*\)", "", declaration)):
                declaration = shorter
            if not declaration or re.match(
                r"(using|friend|static_assert|enum|class|struct)\b(?!.*\}\s*\w)", declaration
            ):
                continue
            if "(" in re.split(r"=|\{", declaration.replace("operator=", "operator "))[0]:
                is_private = (access or ("private" if head[1] == "class" else "public")) != "public"
                methods += is_private and not re.search(r"\(\*\s*\w*\)", declaration)
            elif not declaration.startswith("static ") and not declaration.startswith("inline static "):
                members += 1 + re.sub(r"\{\}|=.*", "", declaration).count(",")
        yield head[2], methods, members


def test_the_parser():
    source = """
    // class Comment { int a; };
    struct Point { int x, y; std::map<int, std::pair<int, int>> more = {{1, {2, 3}}}; bool f() const { return x; } };
    class Shape : public Base<int> {
     public:
      Shape(int a, int b) : a_(a), b_{b} {}
      Shape& operator=(const Shape&) = delete;
      void draw();
     private:
      struct Inner { int one; };
      enum class Kind { a, b };
      static constexpr int kMost = 3;
      void helper(const char* text = "private: void no();");
      template <class T> T other(T value) { if (value) { return value; } return T(); }
      int a_ = 1;
      std::function<void(int)> call_{nullptr};
      Inner inner_;
    };"""
    assert list(_sizes(source)) == [("Point", 0, 3), ("Shape", 2, 3), ("Inner", 0, 1)]


def test_no_class_is_larger():
    sizes = [
        (str(path.relative_to(_CSRC)), *size)
        for path in sorted([*_CSRC.rglob("*.h"), *_CSRC.rglob("*.cpp")])
        for size in _sizes(path.read_text())
    ]
    assert len(sizes) > 150 and any(size[1] == "Runtime" for size in sizes)
    large = [size for size in sizes if size[2] > _MOST_METHODS or size[3] > _MOST_MEMBERS]
    assert not large, f"file, class, private methods, data members: {large}"
