#include "memory/headroom.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>

#include "base/error.h"

namespace mykv {

namespace {

constexpr size_t kReserve = size_t{48} << 20;  // reserve for other allocations of the ranks, by MXNet and Python
// The limits are read again after 1 / kFraction of the free memory was taken. The fraction is small, since other ranks
// take memory meanwhile.
constexpr size_t kFraction = 32;
constexpr size_t kMostUnchecked = size_t{64} << 20;
constexpr size_t kUnlimited = size_t{1} << 60;  // cgroup version 1 shows about 2^63 if there is no limit

// The number in a file that contains only a number; `otherwise` if there is none ('max', no such file).
size_t number_in(const std::string& path, size_t otherwise) {
  std::ifstream file(path);
  size_t number = 0;
  return file >> number ? number : otherwise;
}

// The sum of the numbers in the lines '<name>[:] <number> [kB]' with these names, in the file's unit.
size_t sum_of_lines(const std::string& path, std::initializer_list<const char*> names) {
  std::ifstream file(path);
  std::string line;
  size_t sum = 0;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    size_t number = 0;
    words >> name >> number;
    if (!name.empty() && name.back() == ':') name.pop_back();
    if (std::find(names.begin(), names.end(), name) != names.end()) sum += number;
  }
  return sum;
}

size_t less(size_t a, size_t b) { return a > b ? a - b : 0; }

std::string mebibytes(size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

bool has_word(const std::string& list, const std::string& word) {
  std::istringstream words(list);
  std::string one;
  while (std::getline(words, one, ',')) {
    if (one == word) return true;
  }
  return false;
}

}  // namespace

HeadroomWatch::HeadroomWatch(std::string proc) : proc_(std::move(proc)) { find_cgroups(); }

// mountinfo has the mount points of the controllers, and cgroup this process's path below them.
void HeadroomWatch::find_cgroups() {
  std::string path_1, path_2;
  std::ifstream own(proc_ + "/self/cgroup");
  for (std::string line; std::getline(own, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controllers.empty()) path_2 = line.substr(second + 1);
    if (has_word(controllers, "memory")) path_1 = line.substr(second + 1);
  }
  std::ifstream mounts(proc_ + "/self/mountinfo");
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream words(line);
    std::string skipped, root, point, word, type, device, options;
    words >> skipped >> skipped >> skipped >> root >> point;
    while (words >> word && word != "-") {
    }
    words >> type >> device >> options;
    const bool is_v2 = type == "cgroup2";
    if (!is_v2 && !(type == "cgroup" && has_word(options, "memory"))) continue;
    std::string path = is_v2 ? path_2 : path_1;
    if (path.empty()) continue;
    // A container sees its own group mounted as the root, whatever its name is outside.
    if (root != "/" && path.compare(0, root.size(), root) == 0) path = path.substr(root.size());
    if (path.empty() || path.compare(0, 3, "/..") == 0) path = "/";
    while (true) {
      cgroups_.push_back({point + (path == "/" ? "" : path), is_v2});
      if (path == "/") break;
      const size_t slash = path.rfind('/');
      path = slash == 0 || slash == std::string::npos ? "/" : path.substr(0, slash);
    }
  }
}

Headroom HeadroomWatch::look() const {
  const std::string machine = proc_ + "/meminfo";
  const size_t swap = sum_of_lines(machine, {"SwapFree"}) << 10;
  const size_t available = sum_of_lines(machine, {"MemAvailable"}) << 10;
  Headroom least{available == 0 ? kUnlimited : available + swap, "this machine's memory"};
  for (const Cgroup& one : cgroups_) {
    const std::string limit_file = one.folder + (one.is_v2 ? "/memory.max" : "/memory.limit_in_bytes");
    const size_t limit = number_in(limit_file, kUnlimited);
    if (limit >= kUnlimited) continue;
    const size_t used = number_in(one.folder + (one.is_v2 ? "/memory.current" : "/memory.usage_in_bytes"), 0);
    const std::string stat = one.folder + "/memory.stat";
    const size_t cached = one.is_v2 ? sum_of_lines(stat, {"inactive_file", "active_file"})
                                    : sum_of_lines(stat, {"total_inactive_file", "total_active_file"});
    const size_t own_swap = one.is_v2 ? less(number_in(one.folder + "/memory.swap.max", kUnlimited),
                                             number_in(one.folder + "/memory.swap.current", 0))
                                      : less(number_in(one.folder + "/memory.memsw.limit_in_bytes", kUnlimited), limit);
    const size_t bytes = less(limit, less(used, cached)) + std::min(swap, own_swap);
    if (bytes < least.bytes) least = {bytes, "this container's limit of " + mebibytes(limit) + " (" + limit_file + ")"};
  }
  return least;
}

void HeadroomWatch::require(size_t bytes, size_t whole) {
  if (bytes <= unchecked_) {
    unchecked_ -= bytes;
    return;
  }
  const Headroom now = look();
  if (now.bytes < bytes || now.bytes - bytes < kReserve) {
    unchecked_ = 0;
    throw Error("mykv cannot get " + std::to_string(whole) + " bytes of shared memory: of " + now.what + " " +
                    mebibytes(now.bytes) + " are free, and " + mebibytes(kReserve) +
                    " must stay free. Give the job more memory, or start fewer workers on this host",
                ErrorCode::no_memory);
  }
  unchecked_ = std::min((now.bytes - bytes) / kFraction, kMostUnchecked);
}

}  // namespace mykv
