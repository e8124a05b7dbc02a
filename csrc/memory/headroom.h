// How much memory this process may still take before the kernel kills a process. Beyond the limit of a container
// (cgroup), or of the machine, fallocate() returns no error: the kernel kills a process. So the limits are read first,
// and too little memory is an error.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace mykv {

// A limit on the memory of this process.
struct Headroom {
  size_t bytes;      // bytes that are free, or can be freed at once
  std::string what;  // the limit: 'this container's limit of 512 MiB (/sys/fs/cgroup/memory.max)'
};

class HeadroomWatch {
 public:
  // `proc`: the folder of the proc file system; tests use another folder.
  explicit HeadroomWatch(std::string proc = "/proc");
  // The limit with the least headroom, read now.
  Headroom look() const;
  // Throws Error if taking `bytes` bytes, a part of `whole`, would exceed a limit. Reads the limits rarely while memory
  // is plentiful.
  void require(size_t bytes, size_t whole);

 private:
  // The folder of this process's memory cgroup, or of one of its parent groups.
  struct Cgroup {
    std::string folder;
    bool is_v2;
  };
  void find_cgroups();

  std::string proc_;
  std::vector<Cgroup> cgroups_;
  size_t unchecked_ = 0;  // bytes that may be taken before the limits are read again
};

}  // namespace mykv
