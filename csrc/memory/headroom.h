// How much memory this process may still take before the kernel would end somebody for it. Taking shared memory beyond
// the limit of a container (cgroup), or beyond the machine's, is no error of fallocate(): the kernel kills a process.
// So it is looked up before, and too little is an error.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace mykv {

// What bounds the memory of this process.
struct Headroom {
  size_t bytes;      // that are free, or can be freed at once
  std::string what;  // that is bounded: 'this container's limit of 512 MiB (/sys/fs/cgroup/memory.max)'
};

class HeadroomWatch {
 public:
  // `proc`: where the kernel tells of this process and the machine; tests have one of their own.
  explicit HeadroomWatch(std::string proc = "/proc");
  // The smallest of all bounds, as they are now.
  Headroom look() const;
  // Throws Error if taking so many bytes would go beyond one. Looks only as often as is needed where memory is plenty.
  void require(size_t bytes);

 private:
  // A memory controller's folder of this process, or one above it.
  struct Cgroup {
    std::string folder;
    bool is_v2;
  };
  void find_cgroups();

  std::string proc_;
  std::vector<Cgroup> cgroups_;
  size_t unchecked_ = 0;  // bytes that may be taken before the next look
};

}  // namespace mykv
