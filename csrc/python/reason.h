// A text of Python for a message.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace mykv {

// Any str: what is not Unicode, such as a part of a file's name in another encoding, is written as an escape. As a
// std::string pybind11 would refuse it, and a rank could not tell the other ranks why it refuses.
struct Reason {
  std::string text;
};

}  // namespace mykv

template <>
struct pybind11::detail::type_caster<mykv::Reason> {
  PYBIND11_TYPE_CASTER(mykv::Reason, const_name("str"));

  bool load(handle given, bool) {
    if (!PyUnicode_Check(given.ptr())) return false;
    const auto bytes =
        reinterpret_steal<pybind11::bytes>(PyUnicode_AsEncodedString(given.ptr(), "utf-8", "backslashreplace"));
    if (!bytes) throw error_already_set();
    value.text = static_cast<std::string>(bytes);
    return true;
  }
};
