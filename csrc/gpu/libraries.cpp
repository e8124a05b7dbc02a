#include "gpu/libraries.h"

#include <mutex>

namespace mykv::gpu {

namespace {

// Never destroyed: threads of MXNet's engine may still use it at exit.
Libraries& instance() {
  static Libraries& libraries = *new Libraries;
  return libraries;
}

// Loads the first candidate that has `probe` and can be used; otherwise *problem says why each existing candidate
// cannot be used.
template <class Api>
void load_one(const char* what, const char* probe, const std::vector<std::string>& candidates,
              std::unique_ptr<Api>* api, std::string* problem) {
  problem->clear();
  for (const std::string& candidate : candidates) {
    try {
      const Library library(what, candidate);
      if (!library.has(probe)) continue;  // MXNet's library, a candidate, may contain it or not
      try {
        *api = std::make_unique<Api>(library);
        problem->clear();
        return;
      } catch (const Error& error) {
        *problem += (problem->empty() ? "" : "; ") + std::string(error.what());
      }
    } catch (const Error&) {
      // The candidate does not exist.
    }
  }
  if (problem->empty()) {
    *problem = std::string(what) + " was not found";
    if (candidates.size() == 1) *problem += " in " + candidates[0];
  }
}

}  // namespace

const Libraries& Libraries::load(const std::vector<std::string>& cuda, const std::vector<std::string>& nccl) {
  static std::once_flag once;
  std::call_once(once, [&] {
    Libraries& libraries = instance();
    load_one("the CUDA runtime", "cudaGetDeviceCount", cuda, &libraries.cuda_, &libraries.cuda_problem_);
    load_one("NCCL", "ncclGetVersion", nccl, &libraries.nccl_, &libraries.nccl_problem_);
  });
  return instance();
}

const Libraries& Libraries::get() { return instance(); }

const Cuda& cuda() {
  const Cuda* found = Libraries::get().cuda();
  if (found == nullptr) throw Error(Libraries::get().cuda_problem());
  return *found;
}

}  // namespace mykv::gpu
