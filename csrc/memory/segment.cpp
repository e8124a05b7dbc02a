#include "memory/segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "base/error.h"
#include "memory/headroom.h"

namespace mykv {

// Shared mappings that become private in a forked child, so that its writes reach no other process.

// From now on a fork of this process remaps the range privately. Pages that the child has not written show the other
// processes' writes. A fork costs one system call per range. `fd`: the descriptor that is mapped there, from its
// beginning; it must stay open as long as the range exists.
void private_in_forks(char* base, size_t bytes, int fd);
// Call this before the range is unmapped.
void no_longer_private_in_forks(const char* base);

namespace {

struct SharedRange {
  char* base;
  size_t bytes;
  int fd;
};

struct SharedRanges {
  std::mutex mutex;
  std::vector<SharedRange> ranges;
};

SharedRanges& all();

// Holds the lock during a fork, since another thread may be changing the list.
void before_fork() { all().mutex.lock(); }

void in_parent() { all().mutex.unlock(); }

// Makes only async-signal-safe calls, since the process that forked may have several threads.
void in_child() {
  SharedRanges& known = all();
  constexpr int kPlace = MAP_FIXED | MAP_NORESERVE;
  for (const SharedRange& one : known.ranges) {
    void* made = mmap(one.base, one.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | kPlace, one.fd, 0);
    // If the kernel accounts for all private memory (vm.overcommit_memory=2), the child may only read.
    if (made == MAP_FAILED) (void)mmap(one.base, one.bytes, PROT_READ, MAP_PRIVATE | kPlace, one.fd, 0);
  }
  known.ranges.clear();  // a child of the child inherits private memory, and no system call frees this list
  new (&known.mutex) std::mutex;
}

SharedRanges& all() {
  static SharedRanges& known = *new SharedRanges;
  static const int registered = pthread_atfork(before_fork, in_parent, in_child);
  (void)registered;
  return known;
}

}  // namespace

void private_in_forks(char* base, size_t bytes, int fd) {
  SharedRanges& known = all();
  std::lock_guard<std::mutex> lock(known.mutex);
  known.ranges.push_back({base, bytes, fd});
}

void no_longer_private_in_forks(const char* base) {
  SharedRanges& known = all();
  std::lock_guard<std::mutex> lock(known.mutex);
  auto& ranges = known.ranges;
  ranges.erase(std::remove_if(ranges.begin(), ranges.end(), [&](const SharedRange& one) { return one.base == base; }),
               ranges.end());
}

namespace {

constexpr unsigned kNeverExecutable = 8;   // MFD_NOEXEC_SEAL, which older headers lack
constexpr size_t kStep = size_t{4} << 20;  // a twelfth of require_headroom()'s reserve
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// Empty, with the reason in *refused, if the system allows no memfd: an old kernel, or a sandbox.
FileDescriptor make_memfd(size_t bytes, std::string* refused) {
  // This flag keeps programs from being run from the memory. Kernels before Linux 6.3 return EINVAL for it.
  FileDescriptor fd(memfd_create("mykv", MFD_CLOEXEC | MFD_ALLOW_SEALING | kNeverExecutable));
  if (!fd && errno == EINVAL) fd = FileDescriptor(memfd_create("mykv", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd && errno != EMFILE && errno != ENFILE && errno != ENOMEM) {
    *refused = system_error("mykv cannot make a shared memory segment (memfd_create)").what();
    return {};
  }
  if (!fd) throw system_error("mykv cannot make a shared memory segment (memfd_create)");
  if (const size_t most = Segment::largest(); bytes > most) {
    throw Error("mykv cannot make a shared memory segment of " + std::to_string(bytes >> 20) + " MiB: the limit of a " +
                "file's size (`ulimit -f`) is " + std::to_string(most >> 20) +
                " MiB. Raise it with `ulimit -f unlimited`");
  }
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw system_error("mykv cannot size its shared memory segment (ftruncate)");
  }
  // Without seals, a process with the descriptor could truncate it while others have it mapped (SIGBUS). The mode
  // protects it from processes that find it in /proc.
  if (fchmod(fd.get(), S_IRUSR | S_IWUSR) != 0 || fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    throw system_error("mykv cannot seal its shared memory segment");
  }
  return fd;
}

// One watch for the whole process, which has segments for several groups.
void require_headroom(size_t bytes, size_t whole) {
  static std::mutex mutex;
  static HeadroomWatch watch;
  std::lock_guard<std::mutex> lock(mutex);
  watch.require(bytes, whole);
}

// False if the kernel has no fallocate for memfd: memory is then committed when it is touched.
bool take(int fd, size_t offset, size_t bytes) {
  int failed;
  do {
    failed = fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (failed != 0 && errno == EINTR);
  if (failed != 0 && errno != EOPNOTSUPP && errno != ENOSYS) {
    throw system_error("mykv cannot get " + std::to_string(bytes) + " bytes of shared memory (fallocate)");
  }
  return failed == 0;
}

// Lets ranks take memory one after the other: two ranks that had seen the same free memory would both take it. It is an
// fcntl lock, so it is released when its process ends. If the holder is stopped or slow, other ranks go on without the
// lock after kTries.
class CommitLock {
 public:
  explicit CommitLock(int fd) : guard_(of_threads()), fd_(fd) {
    for (int tries = 0; tries < kTries && !set(F_WRLCK); ++tries) {
      if (errno != EAGAIN && errno != EACCES && errno != EINTR) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  ~CommitLock() { (void)set(F_UNLCK); }
  CommitLock(const CommitLock&) = delete;
  CommitLock& operator=(const CommitLock&) = delete;

 private:
  static constexpr int kTries = 1000;
  static std::mutex& of_threads() {
    static std::mutex mutex;
    return mutex;
  }
  bool set(short type) const {
    struct flock lock{};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    return fcntl(fd_, F_SETLK, &lock) == 0;
  }

  std::lock_guard<std::mutex> guard_;
  int fd_;
};

}  // namespace

Segment::Segment(FileDescriptor fd, size_t bytes) : fd_(std::move(fd)), bytes_(bytes) {
  const int kind = fd_ ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kind | MAP_NORESERVE, fd_.get(), 0);
  if (base == MAP_FAILED) {
    throw system_error("mykv cannot map its shared memory segment of " + std::to_string(bytes >> 20) +
                       " MiB of address space (is `ulimit -v` set?)");
  }
  base_ = static_cast<char*>(base);
  owned_ = true;
  if (fd_) private_in_forks(base_, bytes_, fd_.get());
}

size_t Segment::largest() {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return SIZE_MAX;
  return static_cast<size_t>(limit.rlim_cur);
}

Segment Segment::create(size_t bytes, std::string* refused) { return Segment(make_memfd(bytes, refused), bytes); }

Segment Segment::map(FileDescriptor fd, size_t bytes) {
  struct stat status{};
  if (fstat(fd.get(), &status) != 0) throw system_error("mykv cannot read the size of the shared memory segment");
  if (static_cast<size_t>(status.st_size) != bytes) {
    throw Error("mykv was handed a shared memory segment of " + std::to_string(status.st_size) + " bytes instead of " +
                std::to_string(bytes) + " (do the ranks of this machine see memory of different sizes?)");
  }
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) throw Error("mykv was handed shared memory that is not sealed");
  return Segment(std::move(fd), bytes);
}

Segment Segment::borrow(const Segment& other) {
  Segment segment;
  if (other.fd_) {
    segment.fd_ = FileDescriptor(fcntl(other.fd_.get(), F_DUPFD_CLOEXEC, 0));
    if (!segment.fd_) throw system_error("mykv cannot duplicate the descriptor of its shared memory");
  }
  segment.base_ = other.base_;
  segment.bytes_ = other.bytes_;
  return segment;
}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)),
      base_(std::exchange(other.base_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      owned_(std::exchange(other.owned_, false)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  std::swap(owned_, other.owned_);
  return *this;
}

Segment::~Segment() {
  if (!owned_) return;
  no_longer_private_in_forks(base_);
  munmap(base_, bytes_);
}

void Segment::commit(size_t offset, size_t bytes) const {
  if (!fd_) return;  // private memory is committed when it is touched
  // Memory that a region has kept needs no commit. All processes share the descriptor's position in the file, so only
  // the return value of lseek() can be used.
  const off_t hole = lseek(fd_.get(), static_cast<off_t>(offset), SEEK_HOLE);
  if (hole > static_cast<off_t>(offset)) {
    const size_t kept = std::min(static_cast<size_t>(hole) - offset, bytes);
    offset += kept;
    bytes -= kept;
  }
  if (bytes == 0) return;
  const CommitLock lock(fd_.get());
  require_headroom(bytes, bytes);
  // In steps, so that ranks that take memory at the same time without the lock notice each other. The reserve covers
  // one step for each of a dozen ranks.
  for (size_t done = 0; done < bytes; done += kStep) {
    const size_t step = std::min(kStep, bytes - done);
    if (done > 0) require_headroom(step, bytes);
    if (!take(fd_.get(), offset + done, step)) return;
  }
}

void Segment::clear(size_t offset, size_t bytes) const {
  if (!fd_) return discard(offset, bytes);
  const auto end = static_cast<off_t>(offset + bytes);
  for (off_t at = static_cast<off_t>(offset);;) {
    const off_t data = lseek(fd_.get(), at, SEEK_DATA);
    if (data < 0 || data >= end) return;  // only holes follow
    const off_t hole = lseek(fd_.get(), data, SEEK_HOLE);
    at = hole < 0 ? end : std::min(hole, end);
    std::memset(base_ + data, 0, static_cast<size_t>(at - data));
  }
}

void Segment::discard(size_t offset, size_t bytes) const {
  if (!fd_) {
    (void)madvise(base_ + offset, bytes, MADV_DONTNEED);
    return;
  }
  // If this fails, the memory stays committed until the segment is gone; no error.
  (void)fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                  static_cast<off_t>(bytes));
}

}  // namespace mykv
