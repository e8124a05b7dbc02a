#include "python/errors.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>

#include "mxnet/bridge.h"

namespace py = pybind11;

namespace mykv {

namespace {

py::object* g_error_type = new py::object;    // mykv_core.Error
py::object* g_failure_type = new py::object;  // MXNetError

// The attributes lie in the exception's __dict__, which pickle keeps.
void raise(const py::object& type, const Error& error) {
  const std::string& text = error.cause().text;
  // A text that was cut may end within a character.
  const auto message = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace"));
  const py::object raised = type(message);
  raised.attr("code") = name_of(error.cause().code);
  raised.attr("ranks") = py::tuple(py::cast(error.cause().ranks));
  if (dynamic_cast<const AgreedError*>(&error) != nullptr) raised.attr("agreed") = true;
  PyErr_SetObject(type.ptr(), raised.ptr());
}

}  // namespace

void bind_errors(py::module_& m) {
  *g_error_type = py::exception<Error>(m, "Error", PyExc_RuntimeError);
  g_error_type->attr("__doc__") =
      "Why the core cannot do something. `code` (str) says what kind of end it was, `ranks` (tuple of int) which ranks "
      "it names; docs/errors.md lists the codes. `agreed` (bool): all ranks that met in the call raise the error.";
  g_error_type->attr("code") = name_of(ErrorCode::other);
  g_error_type->attr("ranks") = py::tuple();
  g_error_type->attr("agreed") = false;
  py::list codes;
  for (const char* code : kErrorCodes) codes.append(code);
  g_error_type->attr("codes") = py::tuple(codes);
  *g_failure_type = py::none();
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const mxnet::FailedOperation& error) {
      raise(g_failure_type->is_none() ? py::reinterpret_borrow<py::object>(PyExc_RuntimeError) : *g_failure_type,
            error);
    } catch (const Error& error) {
      raise(*g_error_type, error);
    }
  });
}

void set_failure_type(const py::object& type) { *g_failure_type = type; }

ErrorCode error_code_of(const std::string& name) {
  const auto* const found = std::find(std::begin(kErrorCodes), std::end(kErrorCodes), name);
  if (found == std::end(kErrorCodes)) throw py::value_error("there is no error code '" + name + "'");
  return static_cast<ErrorCode>(found - std::begin(kErrorCodes));
}

}  // namespace mykv
