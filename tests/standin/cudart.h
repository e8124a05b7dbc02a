// Inside of the stand-in for libcudart: errors, devices, streams and memory behind one lock.
//
// A real machine is fast where this is slow, but nothing here is more orderly than there: streams are threads that run
// their operations late, and only events, the legacy default stream and the synchronizing calls order them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "settings.h"
#include "standin.h"

namespace standin {

enum Error : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kMemoryAllocation = 2,
  kInitialization = 3,
  kInvalidMemcpyDirection = 21,
  kInsufficientDriver = 35,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidResourceHandle = 400,
  kNotReady = 600,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
};

struct Stream;

// All work up to a place in a stream: what an event remembers.
struct Point {
  std::shared_ptr<Stream> stream;
  uint64_t sequence = 0;
};

struct Operation {
  std::function<int()> run;
  std::vector<Point> after;
  bool memory = false;         // a copy or a fill, which waits for nobody
  const char* host = nullptr;  // registered memory that it will touch
  size_t host_bytes = 0;
};

struct Stream {
  int device = 0;
  bool blocking = true;  // with respect to the legacy default stream
  bool held = false;
  bool destroyed = false;
  bool lost = false;  // with its device: nothing in it runs any more
  bool running = false;
  uint64_t submitted = 0;
  uint64_t completed = 0;
  std::deque<Operation> queue;  // the front one is running
  std::mt19937 random;
};

struct Event {
  int device = 0;
  Point last;
};

struct Allocation {
  size_t bytes = 0;
  size_t mapped = 0;
  int device = 0;
  char* alias = nullptr;
};

struct Registration {
  size_t bytes = 0;
  int device = 0;
  bool portable = false;
};

struct Device {
  int physical = 0;
  std::string bus_id;
  int error = kSuccess;
  size_t allocated = 0;
  std::shared_ptr<Stream> legacy;  // made when first used
};

struct State {
  std::mutex lock;
  std::condition_variable changed;  // any stream did or got something, a device was lost
  std::vector<Device> devices;
  std::set<std::shared_ptr<Stream>> streams;
  std::set<std::shared_ptr<Stream>> ending;  // destroyed, but not at their ends
  std::map<void*, std::unique_ptr<Event>> events;
  std::map<const char*, Allocation> allocations;      // by the pointer that CUDA's user has
  std::map<const char*, Registration> registrations;  // of host memory
  std::map<std::string, long> calls;
  std::vector<Plant> plants;  // nth: which call in all
  std::deque<std::string> violations;
  uint64_t streams_made = 0;
};

using Lock = std::unique_lock<std::mutex>;

State& state();  // never destroyed: streams run until the process is gone

extern thread_local int current_device;

// The frame of every function of CUDA's: counts, gives planted failures and keeps the last error of the thread.
// `on_device`: an error of the current device is returned instead.
int called(const char* function, bool on_device, const std::function<int()>& body);

// The rest wants the lock held.
int device_error(int device);
std::shared_ptr<Stream> find_stream(void* handle, int device);
int submit(const std::shared_ptr<Stream>& stream, Operation operation);
int wait_for(Lock& lock, const Point& point);
int wait_for_device(Lock& lock, int device);
void revive(Lock& lock, int device);
void violate(const std::string& text);

const std::pair<const char* const, Allocation>* find_allocation(const void* pointer);
const std::pair<const char* const, Registration>* find_registration(const void* pointer);

}  // namespace standin
