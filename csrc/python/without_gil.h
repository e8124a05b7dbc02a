#pragma once

#include <Python.h>
#include <unistd.h>

namespace mykv {

// Releases Python's lock (the GIL) for the lifetime of the object.
//
// A daemon thread may still be in a call when Python ends. If the thread then takes the lock, Python up to 3.13 ends it
// with pthread_exit(), which unwinds its stack. C++ would abort the process if this destructor were left by unwinding.
// So the thread sleeps until the process is gone, as in Python 3.14. pybind11's gil_scoped_release (3.1) aborts the
// process in this case.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // only pthread_exit() ends up here: Python throws no C++ exceptions
      for (;;) ::pause();
    }
  }

 private:
  PyThreadState* state_;
};

}  // namespace mykv
