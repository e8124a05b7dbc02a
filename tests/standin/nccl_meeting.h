// Where the ranks of a communicator meet: memory that all of them map, found by the unique id.
//
// It is a memfd of the process that made the id, which the others open through /proc: it has no name, does not care for
// network namespaces, and is gone with the processes however they end.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace standin {

constexpr int kMaxRanks = 64;
constexpr size_t kStageBytes = 1 << 20;     // what a rank shows to the others at a time
constexpr size_t kChannelBytes = 64 << 10;  // of a message from one rank to another

struct UniqueId {
  char bytes[128];
};

struct Description {  // of an operation, for comparison
  int kind, type, op, root;
  uint64_t count;
  double scalar;
};

struct alignas(64) Seat {
  std::atomic<int> state;  // kEmpty ...
  int pid;
  uint64_t host;
  char bus_id[16];
  std::atomic<uint64_t> arrived;  // barriers that this rank has come to
  Description operations[2];      // by turns: a rank may be one operation ahead of another that still compares
};

struct alignas(64) Channel {  // one piece of a message from one rank to another
  std::atomic<uint32_t> full;
  std::atomic<uint32_t> broken;
  int type;
  uint64_t total;
  uint64_t bytes;
};

struct Table {
  std::atomic<uint32_t> bell;  // rings when anything changes
  std::atomic<int> size;
  std::atomic<int> failure;
  Seat seats[kMaxRanks];
  Channel channels[kMaxRanks][kMaxRanks];  // [from][to]
};

class Meeting {
 public:
  enum State : int { kEmpty = 0, kTaken = 1, kPresent = 2 };

  // A wait for a condition; gives up and returns false when the caller's communicator is aborted.
  using Wait = std::function<bool(const std::function<bool()>&)>;

  static bool make(UniqueId* id);

  Meeting() = default;
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  // Map the memory of this id; false if the process that made it is gone.
  bool open(const UniqueId& id);
  // Take a seat and wait for all ranks. NCCL's result, and a text where it is an error.
  int join(int rank, int size, const std::string& bus_id, const Wait& wait, std::string* text);

  bool barrier(const Wait& wait);
  void ring();
  void sleep(uint32_t bell) const;  // until it rings, or a while has passed
  uint32_t bell() const { return table_->bell.load(); }

  Seat& seat(int rank) { return table_->seats[rank]; }
  Channel& channel(int from, int to) { return table_->channels[from][to]; }
  char* stage(int rank) { return data_ + static_cast<size_t>(rank) * kStageBytes; }
  char* channel_data(int from, int to) {
    return data_ + kMaxRanks * kStageBytes + static_cast<size_t>(from * kMaxRanks + to) * kChannelBytes;
  }
  bool maker_is_dead() const { return dead(maker_); }
  int dead_rank() const;  // -1 if all live

 private:
  static bool dead(int process);

  Table* table_ = nullptr;
  char* data_ = nullptr;
  int rank_ = 0;
  int size_ = 0;
  uint64_t barriers_ = 0;
  uint64_t inode_ = 0;
  int maker_ = -1;           // pidfd
  std::vector<int> others_;  // pidfds by rank, -1 for this process
};

}  // namespace standin
