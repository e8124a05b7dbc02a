// Messages under way between ranks of different hosts: sent and received without blocking, and polled all together,
// since every poll costs a system call.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/mpi_check.h"
#include "base/planted_faults.h"

namespace mykv {

class MpiRequests {
 public:
  explicit MpiRequests(MPI_Comm comm) : comm_(comm) {}

  // Both increment *pending for each message that they start. poll() decrements it when the message was sent or
  // received.
  void send(const void* data, size_t bytes, int to, int tag, size_t* pending);
  void receive(void* data, size_t bytes, int from, int tag, size_t* pending);
  // Polls the network. Returns whether a message ended.
  bool poll();
  const Traffic& sent() const { return sent_; }
  const Traffic& received() const { return received_; }
  bool empty() const { return requests_.empty(); }

  // Cancels all receives; a message under way may still arrive. Afterwards *pending is no longer updated.
  void cancel();
  // After cancel(): polls once. Returns whether the only messages left are messages to ranks in `gone`.
  bool only_to(const std::set<int>& gone);

 private:
  struct Outstanding {
    size_t* pending;
    int to;  // the receiver's rank; kReceived if the message is received
  };
  MPI_Request* add(size_t* pending, int to);
  void remove(size_t at);

  MPI_Comm comm_;
  std::vector<MPI_Request> requests_;
  std::vector<Outstanding> outstanding_;  // one element for each element of requests_
  std::vector<int> ended_;
  Traffic sent_;
  Traffic received_;
};

// Memory for values received from other hosts or encoded for them. It is kept for the next chunk, since fresh memory
// costs a page fault for every 4 KiB.

class Staging {
 public:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  struct Block {
    std::unique_ptr<char, Free> memory;
    size_t bytes = 0;
    char* data() const { return memory.get(); }
  };

  // A block of at least this size, aligned to a cache line.
  Block take(size_t bytes) {
    if (testing::is_planted(testing::Fault::memory)) throw no_memory(bytes);
    for (Block& kept : free_) {
      if (kept.bytes < bytes) continue;
      Block block = std::move(kept);
      kept = std::move(free_.back());
      free_.pop_back();
      return block;
    }
    // No kept block is large enough. One of them is freed: otherwise blocks that are too small would pile up.
    if (!free_.empty()) free_.pop_back();
    constexpr size_t kLine = 64;
    Block block;
    block.bytes = (bytes + kLine - 1) / kLine * kLine;
    block.memory.reset(static_cast<char*>(std::aligned_alloc(kLine, block.bytes)));
    if (block.memory == nullptr) throw no_memory(bytes);
    return block;
  }
  void give_back(Block block) {
    if (block.memory != nullptr) free_.push_back(std::move(block));
  }

 private:
  static Error no_memory(size_t bytes) {
    return Error("there is no memory for the exchange between hosts: malloc() cannot give " + std::to_string(bytes) +
                     " bytes. Give the job more memory, or start fewer workers on this host",
                 ErrorCode::no_memory);
  }

  std::vector<Block> free_;
};

}  // namespace mykv
