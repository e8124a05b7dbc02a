// Memory that the ranks of a communicator share.
#include "nccl_meeting.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>

#include "nccl_types.h"

namespace standin {
namespace {

constexpr size_t kTableBytes = (sizeof(Table) + 4095) / 4096 * 4096;
constexpr size_t kBytes = kTableBytes + kMaxRanks * kStageBytes + kMaxRanks * kMaxRanks * kChannelBytes;
constexpr uint64_t kMagic = 0x6e6964616e617473;

struct Contents {  // of a unique id
  uint64_t magic;
  uint64_t inode;
  int pid;
  int file;
};

std::mutex made_lock;
std::map<uint64_t, int> made;  // inode -> file, of ids that this process made and that were not met at yet

uint64_t host_hash() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  uint64_t hash = 5381;
  for (const char* c = name; *c; ++c) hash = hash * 33 + static_cast<unsigned char>(*c);
  return hash;
}

unsigned bus_number(const char* bus_id) {  // as NCCL prints it: without punctuation
  std::string digits;
  for (const char* c = bus_id; *c; ++c)
    if (*c != ':' && *c != '.') digits += *c;
  return static_cast<unsigned>(std::strtoul(digits.c_str(), nullptr, 16));
}

int open_process(int pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

}  // namespace

bool Meeting::make(UniqueId* id) {
  int file = memfd_create("standin-nccl", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, kBytes) != 0) return false;
  struct stat status;
  fstat(file, &status);
  Contents contents = {kMagic, status.st_ino, static_cast<int>(getpid()), file};
  std::memset(id, 0, sizeof *id);
  std::memcpy(id, &contents, sizeof contents);
  std::lock_guard<std::mutex> lock(made_lock);
  made[contents.inode] = file;
  return true;
}

bool Meeting::open(const UniqueId& id) {
  Contents contents;
  std::memcpy(&contents, &id, sizeof contents);
  if (contents.magic != kMagic) return false;
  maker_ = open_process(contents.pid);
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", contents.pid, contents.file);
  int file = ::open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return false;
  struct stat status;
  void* memory = MAP_FAILED;
  if (fstat(file, &status) == 0 && status.st_ino == contents.inode && status.st_size == static_cast<off_t>(kBytes))
    memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  inode_ = contents.inode;
  close(file);
  if (memory == MAP_FAILED) return false;
  table_ = static_cast<Table*>(memory);
  data_ = static_cast<char*>(memory) + kTableBytes;
  return true;
}

Meeting::~Meeting() {
  if (table_) munmap(table_, kBytes);
  if (maker_ >= 0) close(maker_);
  for (int other : others_)
    if (other >= 0) close(other);
}

int Meeting::join(int rank, int size, const std::string& bus_id, const Wait& wait, std::string* text) {
  char line[160];
  rank_ = rank;
  size_ = size;
  int none = 0;
  if (!table_->size.compare_exchange_strong(none, size) && none != size) {
    std::snprintf(line, sizeof line, "Bootstrap Root : mismatch in rank count from procs %d : %d", none, size);
    *text = line;
    table_->failure = kInternalError;
    ring();
    return kInternalError;
  }
  Seat& mine = seat(rank);
  int empty = kEmpty;
  if (!mine.state.compare_exchange_strong(empty, kTaken)) {
    std::snprintf(line, sizeof line, "Bootstrap Root : rank %d of %d ranks has already checked in", rank, size);
    *text = line;
    table_->failure = kInternalError;
    ring();
    return kInternalError;
  }
  mine.pid = static_cast<int>(getpid());
  mine.host = host_hash();
  std::snprintf(mine.bus_id, sizeof mine.bus_id, "%s", bus_id.c_str());
  mine.state = kPresent;
  ring();
  bool met = wait([&] {
    if (table_->failure) return true;
    for (int other = 0; other < size; ++other)
      if (seat(other).state != kPresent) return false;
    return true;
  });
  if (!met || table_->failure) {
    *text = "Connection closed by remote peer while the communicator was initialized";
    return table_->failure ? table_->failure.load() : static_cast<int>(kRemoteError);
  }

  int result = kSuccess;
  for (int a = 0; a < size; ++a) {
    others_.push_back(seat(a).pid == getpid() ? -1 : open_process(seat(a).pid));
    for (int b = 0; b < size; ++b) {
      if (a == b || seat(a).host != seat(b).host || std::strcmp(seat(a).bus_id, seat(b).bus_id) != 0) continue;
      if (a == rank) {
        std::snprintf(line, sizeof line, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x", a, b,
                      bus_number(seat(b).bus_id));
        *text = line;
        result = kInvalidUsage;
      } else if (result == kSuccess) {
        *text = "Connection closed by remote peer while the communicator was initialized";
        result = kRemoteError;
      }
    }
  }
  if (result == kSuccess && !barrier(wait)) result = kRemoteError;
  std::lock_guard<std::mutex> lock(made_lock);
  auto file = made.find(inode_);
  if (file != made.end()) {  // all are there: nobody needs to find it any more
    close(file->second);
    made.erase(file);
  }
  return result;
}

bool Meeting::barrier(const Wait& wait) {
  uint64_t now = ++barriers_;
  auto complete = [&] {
    for (int other = 0; other < size_; ++other)
      if (seat(other).arrived.load() < now) return false;
    return true;
  };
  seat(rank_).arrived.store(now);
  if (complete()) {
    ring();
    return true;
  }
  return wait(complete);
}

void Meeting::ring() {
  table_->bell.fetch_add(1);
  syscall(SYS_futex, &table_->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Meeting::sleep(uint32_t bell) const {
  timespec limit = {0, 20'000'000};
  syscall(SYS_futex, &table_->bell, FUTEX_WAIT, bell, &limit, nullptr, 0);
}

bool Meeting::dead(int process) {
  pollfd item = {process, POLLIN, 0};
  return process >= 0 && poll(&item, 1, 0) > 0;
}

int Meeting::dead_rank() const {
  for (size_t rank = 0; rank < others_.size(); ++rank)
    if (dead(others_[rank])) return static_cast<int>(rank);
  return -1;
}

}  // namespace standin
