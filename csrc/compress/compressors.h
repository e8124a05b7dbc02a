// The compressors of this build, each in a file of its own. A function takes the parameters that it knows and leaves
// the others.
#pragma once

#include <memory>

#include "compress/compressor.h"

namespace mykv::compress {

std::shared_ptr<const Compressor> make_two_bit(Parameters& parameters);
std::shared_ptr<const Compressor> make_one_bit(Parameters& parameters);
std::shared_ptr<const Compressor> make_sign(Parameters& parameters);
std::shared_ptr<const Compressor> make_top_k(Parameters& parameters);
std::shared_ptr<const Compressor> make_random_k(Parameters& parameters);
std::shared_ptr<const Compressor> make_dithering(Parameters& parameters);

}  // namespace mykv::compress
