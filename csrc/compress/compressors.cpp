#include "compress/compressors.h"

#include <map>
#include <mutex>

#include "base/error.h"

namespace mykv::compress {

namespace {

struct Factory {
  const char* name;
  std::shared_ptr<const Compressor> (*make)(Parameters&);
};

constexpr Factory kFactories[] = {
    {"2bit", make_2bit}, {"1bit", make_1bit},       {"onebit", make_onebit},
    {"topk", make_topk}, {"randomk", make_randomk}, {"dithering", make_dithering},
};

}  // namespace

std::shared_ptr<const Compressor> make_compressor(const std::string& text) {
  Parameters parameters(text);
  for (const Factory& factory : kFactories) {
    if (parameters.name() != factory.name) continue;
    std::shared_ptr<const Compressor> made = factory.make(parameters);
    parameters.finish();
    return made;
  }
  throw Error("there is no compressor '" + parameters.name() + "'");
}

const Compressor& compressor_of(const std::string& text) {
  static std::mutex& mutex = *new std::mutex;
  static auto& made = *new std::map<std::string, std::shared_ptr<const Compressor>>;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<const Compressor>& compressor = made[text];
  if (!compressor) compressor = make_compressor(text);
  return *compressor;
}

}  // namespace mykv::compress
