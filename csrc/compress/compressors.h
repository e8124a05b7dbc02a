// The compressors of this build, each in a file of its own, and the choice among them.
#pragma once

#include <memory>
#include <string>

#include "compress/compressor.h"

namespace mykv::compress {

// A function takes the parameters that it knows and leaves the others.
std::shared_ptr<const Compressor> make_2bit(Parameters& parameters);
std::shared_ptr<const Compressor> make_1bit(Parameters& parameters);
std::shared_ptr<const Compressor> make_onebit(Parameters& parameters);
std::shared_ptr<const Compressor> make_topk(Parameters& parameters);
std::shared_ptr<const Compressor> make_randomk(Parameters& parameters);
std::shared_ptr<const Compressor> make_dithering(Parameters& parameters);

// The compressor of 'name key=value ...', for example 'topk k=0.01 ef=True'. Throws Error, with a sentence for the
// user.
std::shared_ptr<const Compressor> make_compressor(const std::string& text);

// The same compressor, made once for each text and never destroyed.
const Compressor& compressor_of(const std::string& text);

}  // namespace mykv::compress
