#include "compress/compressor.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "compress/compress_path.h"
#include "python/without_gil.h"
#include "testing/bindings.h"

namespace py = pybind11;

namespace mykv {
namespace {

using compress::Compressor;

void require_floats(const py::array& array, bool writeable) {
  if (!(array.flags() & py::array::c_style) || !(array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) ||
      (array.dtype().kind() != 'f') || (array.itemsize() != 4 && array.itemsize() != 8)) {
    throw py::value_error("a compressor takes C-contiguous arrays of float32 and float64");
  }
  if (writeable && !array.writeable()) throw py::value_error("an output array is read-only");
}

compress::Piece piece_of(const py::array& array, size_t total) {
  const auto count = static_cast<size_t>(array.size());
  return {array.itemsize() == 8 ? DType::float64 : DType::float32, count, total == 0 ? count : total};
}

py::array_t<uint8_t> encode(const Compressor& compressor, const py::array& values,
                            const std::optional<py::array>& residual, size_t total, double unit, uint32_t step,
                            uint64_t stream) {
  require_floats(values, false);
  const compress::Piece piece = piece_of(values, total);
  compress::Input input;
  input.values = values.data();
  if (residual) {
    require_floats(*residual, true);
    if (residual->size() != values.size() || residual->itemsize() != values.itemsize()) {
      throw py::value_error("the residual must have the shape and dtype of the values");
    }
    input.residual = const_cast<void*>(residual->data());
  }
  input.unit = unit;
  input.draws.step = step;
  input.draws.stream = stream;
  py::array_t<uint8_t> message(static_cast<py::ssize_t>(compressor.bytes(piece)));
  auto* const bytes = reinterpret_cast<char*>(message.mutable_data());
  WithoutGil release;
  compressor.encode(piece, input, bytes);
  return message;
}

void decode(const Compressor& compressor, const py::array_t<uint8_t, py::array::c_style>& message,
            const py::array& values, size_t total) {
  require_floats(values, true);
  const compress::Piece piece = piece_of(values, total);
  if (static_cast<size_t>(message.size()) != compressor.bytes(piece)) {
    throw Error("a message for " + std::to_string(piece.count) + " elements has " +
                std::to_string(compressor.bytes(piece)) + " bytes, not " + std::to_string(message.size()));
  }
  const auto* const bytes = reinterpret_cast<const char*>(message.data());
  auto* const target = const_cast<void*>(values.data());
  WithoutGil release;
  compressor.decode(piece, bytes, target);
}

py::array_t<uint32_t> random_numbers(uint64_t seed, uint32_t step, uint64_t stream, size_t count) {
  compress::Draws draws;
  draws.seed = seed;
  draws.step = step;
  draws.stream = stream;
  std::vector<uint32_t> indices(count);
  py::array_t<uint32_t> numbers(static_cast<py::ssize_t>(count));
  compress::compress_path().collect_draws(indices.data(), numbers.mutable_data(), count, draws, 0);
  for (size_t i = 0; i < count; ++i) numbers.mutable_data()[i] = ~numbers.mutable_data()[i];
  return numbers;
}

}  // namespace

void bind_compressor(py::module_& m) {
  py::class_<Compressor, std::shared_ptr<Compressor>>(
      m, "Compressor", "A compressor of gradients between hosts, from a text such as 'topk k=0.01 ef=True'.")
      .def(py::init([](const std::string& text) {
             return std::const_pointer_cast<Compressor>(compress::make_compressor(text));
           }),
           py::arg("text"))
      .def_property_readonly("text", &Compressor::text)
      .def_property_readonly("feedback", &Compressor::feedback)
      .def("encode", &encode, py::arg("values"), py::arg("residual") = py::none(), py::arg("total") = 0,
           py::arg("unit") = 1.0, py::arg("step") = 0, py::arg("stream") = 0,
           "The message, as bytes; `residual` is changed in place. `total`: elements of the array whose piece it is.")
      .def("decode", &decode, py::arg("message"), py::arg("values"), py::arg("total") = 0,
           "Decode the message into `values`.");
  m.def("random_numbers", &random_numbers, py::arg("seed"), py::arg("step"), py::arg("stream"), py::arg("count"),
        "The random numbers that compressors use for the first elements of a piece.");
}

}  // namespace mykv
