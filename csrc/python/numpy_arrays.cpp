// Operations of a Group on arrays of numpy.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "operations/signature.h"
#include "python/group.h"

namespace py = pybind11;

namespace mykv {

namespace {

DType dtype_of(const py::array& array) { return dtype_named(py::cast<std::string>(py::str(array.dtype()))); }

void require_contiguous(const py::array& array, bool writeable) {
  if (!(array.flags() & py::array::c_style)) throw py::value_error("mykv takes C-contiguous arrays only");
  if (writeable && !array.writeable()) throw py::value_error("an output array is read-only");
}

}  // namespace

std::unique_ptr<Work> Group::submit(const std::string& name, Operation operation, const std::vector<py::array>& inputs,
                                    const std::vector<py::array>& outputs, const std::string& label,
                                    const std::string& turn_of) {
  const std::vector<py::array>& some = inputs.empty() ? outputs : inputs;
  if (some.empty()) throw py::value_error("no array was given");
  Request request;
  request.name = name;
  operation.set_arrays(dtype_of(some[0]), static_cast<size_t>(some[0].size()));
  const auto shape = py::cast<std::string>(py::str(some[0].attr("shape")));
  std::vector<py::array> kept;
  for (const std::vector<py::array>* arrays : {&inputs, &outputs}) {
    for (const py::array& array : *arrays) {
      require_contiguous(array, arrays == &outputs);
      if (dtype_of(array) != operation.dtype || py::cast<std::string>(py::str(array.attr("shape"))) != shape) {
        throw py::value_error("the arrays of one call differ in shape or dtype");
      }
      kept.push_back(array);
    }
  }
  for (const py::array& array : inputs) {
    // A single array is copied by memcpy, also unaligned; several arrays are summed in place.
    if (inputs.size() > 1 && !(array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_)) {
      throw py::value_error("one of several input arrays is not aligned to its items");
    }
    request.inputs.push_back(array.data());
  }
  for (const py::array& array : outputs) request.outputs.push_back(const_cast<void*>(array.data()));
  request.operation = operation;
  request.signature = signature_of(operation, shape, world().label(operation.root), label);
  return post(std::move(request), std::move(kept), turn_of);
}

std::unique_ptr<Work> Group::submit_allreduce(const std::string& name, const std::vector<py::array>& inputs,
                                              const std::vector<py::array>& outputs, const std::string& op,
                                              double scale, int priority, const std::string& label,
                                              const std::string& wire, const std::string& turn_of) {
  if (inputs.empty()) throw py::value_error("an allreduce needs an input array");
  return submit(name, allreduce_operation(*runtime_, op, scale, priority, wire), inputs, outputs, label, turn_of);
}

std::unique_ptr<Work> Group::submit_broadcast(const std::string& name, const std::optional<py::array>& input,
                                              const std::vector<py::array>& outputs, int root, int priority,
                                              const std::string& label) {
  std::vector<py::array> inputs;
  if (input) inputs.push_back(*input);
  if (!input && root == world().rank()) throw py::value_error("the root of a broadcast needs an input array");
  return submit(name, broadcast_operation(root, priority), inputs, outputs, label);
}

}  // namespace mykv
