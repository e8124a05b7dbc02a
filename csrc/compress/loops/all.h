// One instruction set's table.
#pragma once

#include "compress/loops/collect.h"
#include "compress/loops/dither.h"
#include "compress/loops/signs.h"
#include "compress/loops/sums.h"

namespace mykv::compress {
namespace {

template <typename T>
constexpr Loops<T> kLoops{
    correct<T>,        subtract<T>,       sum_magnitudes<T>, sum_products<T>, largest_magnitude<T>,
    encode_two_bit<T>, decode_two_bit<T>, encode_above<T>,   encode_sign<T>,  decode_sign<T>,
    encode_dither<T>,  decode_dither<T>,  collect<T>,
};

}  // namespace
}  // namespace mykv::compress
