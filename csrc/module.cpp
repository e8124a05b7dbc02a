// The Python bindings of the core. The module imports without MXNet and never initializes MPI by itself.
#include <pybind11/pybind11.h>

#include "python/arguments.h"
#include "python/bindings.h"
#include "python/work.h"

PYBIND11_MODULE(_core, m) {
  using namespace mykv;
  m.doc() = "The compiled core of mykv: collective operations over shared memory and MPI.";
  bind_errors(m);
  bind_work(m);
  bind_buffer(m);  // before the functions whose signatures name it
  bind_group(m);
  bind_world(m);
  bind_build_facts(m);
  bind_gpu(m);
  bind_prepared(m);
  bind_fence(m);
  bind_mxnet(m);
  bind_late_views(m);
  bind_gradient_norm(m);
  bind_timeline(m);
  bind_mpi_exit(m);
  bind_failed_end(m);
  bind_stall_watch(m);
}
