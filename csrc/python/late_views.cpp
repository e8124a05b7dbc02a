// Views of numpy's memory end on threads of MXNet's engine, also while Python exits and afterwards. A thread that asks
// for Python's lock then is ended by Python, and the process with it ("terminate called without an active exception").
// So these threads only note which objects have no view any more; the objects are dropped by a thread that has the
// lock.
#include "python/late_views.h"

#include <Python.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <utility>

#include "python/bindings.h"

namespace py = pybind11;

namespace mykv {

namespace {

constexpr int kLooks = 1000;
constexpr int kLookUs = 1000;

// DLPack's struct, in the form that MXNet has. Only the owner is used.
struct ManagedTensor {
  struct {
    void* data;
    int32_t device[2];
    int32_t dimensions;
    uint8_t type[4];
    int64_t* shape;
    int64_t* strides;
    uint64_t byte_offset;
  } tensor;
  PyObject* owner;
  void (*deleter)(ManagedTensor*);
};
static_assert(sizeof(ManagedTensor) == 64, "another layout than DLPack's");

struct Returned {
  PyObject* owner;
  Returned* next;
};

// Without a mutex, which a fork might find locked.
std::atomic<Returned*> g_returned{nullptr};
std::atomic<bool> g_asked{false};  // Python is about to call drop
std::atomic<bool> g_ended{false};  // Python exits, and what is returned from now on is kept
std::atomic<int> g_asking{0};      // threads that are about to ask

int drop(void*) {
  drop_returned_memory();
  return 0;
}

void give_back(ManagedTensor* view) {
  auto* const mine = new Returned{view->owner, g_returned.load()};
  while (!g_returned.compare_exchange_weak(mine->next, mine)) {
  }
  ++g_asking;
  if (!g_ended && !g_asked.exchange(true) && Py_AddPendingCall(&drop, nullptr) != 0) g_asked = false;
  --g_asking;
}

void keep_returned_memory() {
  g_ended = true;
  for (int looks = 0; g_asking > 0 && looks < kLooks; ++looks) usleep(kLookUs);
}

}  // namespace

void drop_returned_memory() {
  g_asked = false;
  if (g_returned.load(std::memory_order_relaxed) == nullptr) return;
  for (Returned* one = g_returned.exchange(nullptr); one != nullptr;) {
    Py_DECREF(one->owner);
    delete std::exchange(one, one->next);
  }
}

void bind_late_views(py::module_& m) {
  m.def(
      "deleter_of_views", [] { return reinterpret_cast<uintptr_t>(&give_back); },
      "The address of a function that returns the memory of a DLPack view to its owner, an object of Python. Any\n"
      "thread may call it at any time.");
  m.def("keep_returned_memory", &keep_returned_memory, py::call_guard<py::gil_scoped_release>(),
        "Python exits: memory that views return from now on stays where it is.");
}

}  // namespace mykv
