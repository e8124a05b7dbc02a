// How the shares of an operation are combined. One transport carries all operations of a world on host memory;
// choose_transport() picks it. Only the runtime's thread drives a transport, and a transport never blocks it.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "memory/region.h"
#include "operations/operation.h"
#include "table/host_table.h"
#include "world/world.h"

namespace mykv {

namespace gpu {
struct GpuRoads;
}

class CompressionState;
struct Request;

// Memory of this process that is used instead of a slot.
struct LocalShare {
  const char* input = nullptr;
  char* output = nullptr;
  std::function<void(const char* slot)> take;     // alternative: copies the result out of another rank's slot
  const Request* request = nullptr;               // by NCCL: the request, alive until stop()
  std::shared_ptr<CompressionState> compression;  // null: values are not compressed between hosts
};

class Transport {
 public:
  virtual ~Transport() = default;
  // The local rank that does all the work of an operation, or kAnybody. The owner's share need not be in a slot.
  // `number` counts operations in the order in which most ranks will send them, so that owners alternate.
  virtual int32_t owner(const Operation& operation, uint64_t number) const = 0;
  // Whether the other ranks copy the result of a broadcast from the root's slot, and so have no slots.
  virtual bool taken_from_root(const Operation& operation) const = 0;
  // The number of pieces of an operation; the same on every rank of a host. The operation is done when
  // HostTable::finish_pieces() has counted them all.
  virtual uint32_t pieces(const Operation& operation) const = 0;
  // The number of sequence numbers that an operation takes in the hosts' agreed order.
  virtual uint32_t sequence_numbers(const Operation& operation) const = 0;
  // Operations of at most this size in bytes may be run by the rank that arrives last, with run_whole().
  virtual size_t inline_limit() const = 0;
  // Does all the work of such an operation, on any thread of that rank.
  virtual void run_whole(uint32_t entry) const = 0;
  // Whether an operation is small enough for the messages of the agreement between hosts to carry its values. The first
  // rank of each host then does all the work for its host: own_share() and then, with the result, put_result().
  virtual bool is_carried(const Operation&) const { return false; }
  // This host's contribution: its sum, or for a broadcast the values if the root is on this host. False: the operation
  // has ended meanwhile.
  virtual bool own_share(uint32_t, std::vector<char>*) const { return false; }
  virtual void put_result(uint32_t, const std::vector<char>&) {}
  // Every rank is ready for the operation of this entry. `share`: this rank's memory if it has no slot.
  virtual void start(uint32_t entry, const LocalShare& share) = 0;
  // The operation has ended, or this rank leaves it: the transport must not touch the entry again.
  virtual void stop(uint32_t entry) = 0;
  // Whether this rank has begun the entry, and other ranks or a device still work on it together with this rank: if the
  // operation fails then, this rank cannot continue.
  virtual bool holds(uint32_t) const { return false; }
  // A rank has left: this rank stops its work on operations under way, and tells the ranks that wait for this rank.
  virtual void note_departed(const Departed&) {}
  // After note_departed(): whether the transport has stopped using memory of operations. Never throws.
  virtual bool uses_no_memory() { return true; }
  // Does one piece of work; false if there is nothing to do now.
  virtual bool progress() = 0;
  // Whether only a later progress() notices the end of operations under way, as with a network: sleep only briefly.
  virtual bool polling() const = 0;
  // Messages with values, and their bytes, that this rank has sent to other hosts and received. On any thread.
  virtual std::array<uint64_t, 4> traffic() const { return {}; }
  // Whether no message to or from other hosts is under way, including the notice that this rank leaves.
  virtual bool quiet() const { return !polling(); }
};

// Settings for several hosts. All must be the same on all ranks.
struct NetworkOptions {
  // Limit in bytes for values that this rank receives from other hosts. The operations under way have at most twice as
  // many bytes together, unless there are only two.
  size_t bytes = 4 << 20;
  // How many hosts each host hears from while they agree on what is ready.
  size_t fan_out = 16;
  // If there are more hosts, they exchange large values in a grid (HostGrid).
  size_t most_in_a_row = 64;
};

// The choice for this world: shared memory on one host, otherwise MPI between hosts.
std::unique_ptr<Transport> choose_transport(const World& world, HostTable& table, const NetworkOptions& options);

// Each transport of this build, with the reason why this world cannot use it ('': it can).
std::vector<std::pair<std::string, std::string>> transport_report(const World* world, const gpu::GpuRoads* gpus);

}  // namespace mykv
