// How the bytes of an operation meet. One transport carries all operations of a world; choose_transport() picks it.
// A transport is driven by the runtime's thread alone and never blocks it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory/region.h"
#include "operations/operation.h"
#include "table/departed.h"
#include "table/host_table.h"
#include "world/world.h"

namespace mykv {

namespace gpu {
struct GpuRoads;
}

class CompressionState;
struct Request;

// Memory of this process that takes the place of its slot.
struct LocalShare {
  const char* input = nullptr;
  char* output = nullptr;
  std::function<void(const char* slot)> take;     // instead: copies the result out of another rank's slot
  const Request* request = nullptr;               // of an operation by NCCL: alive until stop()
  std::shared_ptr<CompressionState> compression;  // where values are compressed between hosts
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual const char* name() const = 0;
  // The local rank that does all the work of an operation, or kAnybody. Its share need not lie in a slot. `number`
  // counts operations in the order in which most ranks will send them, so that owners can take turns.
  virtual int32_t owner(const Operation& operation, uint64_t number) const = 0;
  // Whether the others take the result of a broadcast straight from the root's slot and so have none themselves.
  virtual bool taken_from_root(const Operation& operation) const = 0;
  // Into how many pieces this transport cuts an operation; the same on every rank of a host. The operation is done
  // when HostTable::finish_chunks() was told of that many.
  virtual uint32_t pieces(const Operation& operation) const = 0;
  // How many places an operation takes in the order that hosts agree on.
  virtual uint32_t places(const Operation& operation) const = 0;
  // Operations of at most so many bytes may be done whole by the rank that arrives last (run_whole).
  virtual size_t inline_limit() const = 0;
  // Does the whole of such an operation, on any thread of that rank.
  virtual void run_whole(uint32_t entry) const = 0;
  // Every rank is ready for the operation behind this entry. `share`: where this rank's share lies if it is the owner
  // and has no slot.
  virtual void start(uint32_t entry, const LocalShare& share) = 0;
  // The operation ended, or this rank leaves it: the entry must not be touched any more.
  virtual void stop(uint32_t entry) = 0;
  // Whether this rank has begun with the entry and other ranks, or a device, still work on it with this one: where it
  // fails, this rank cannot go on.
  virtual bool holds(uint32_t) const { return false; }
  // This rank takes no further part in what is under way, since that rank has gone; says so to those that wait for it.
  virtual void give_up(const Departed&) {}
  // After that: whether nothing of it uses the memory of operations any more. Never throws.
  virtual bool settled() { return true; }
  // Does one piece of work; false when there is nothing to do now.
  virtual bool progress() = 0;
  // Whether something is under way that only a later progress() can see end (a network): sleep short.
  virtual bool polling() const = 0;
  // No message to or from other hosts is under way, nor one that says that this rank goes.
  virtual bool quiet() const { return !polling(); }
};

// The choice for this world: shared memory alone on one host, MPI between hosts else.
// `network_bytes`: memory for what this rank receives from other hosts.
std::unique_ptr<Transport> choose_transport(const World& world, HostTable& table, size_t network_bytes);

// Each transport of this build, with the reason why it does not serve this world ('' where it does).
std::vector<std::pair<std::string, std::string>> transport_report(const World* world, const gpu::GpuRoads* gpus);

}  // namespace mykv
