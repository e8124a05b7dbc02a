#include "compress/compressors.h"

#include <map>
#include <mutex>

#include "base/error.h"
#include "base/forks.h"

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

struct Made {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Compressor>> by_text;
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
  auto& made = usable_in_forks<Made>();
  std::lock_guard<std::mutex> lock(made.mutex);
  std::shared_ptr<const Compressor>& compressor = made.by_text[text];
  if (!compressor) compressor = make_compressor(text);
  return *compressor;
}

}  // namespace mykv::compress
