// Functions that add bindings to the module, for source files without a header of their own.
#pragma once

#include <pybind11/pybind11.h>

namespace mykv {

void bind_group(pybind11::module_& m);     // the class Group, and its methods as functions for the world
void bind_buffer(pybind11::module_& m);    // the memory of buckets
void bind_prepared(pybind11::module_& m);  // an operation on a bucket, created once and pushed in each step
void bind_fence(pybind11::module_& m);     // an operation that does nothing; also created once
// Starts and ends the groups; called after bind_group(), since its signatures name Group.
void bind_world(pybind11::module_& m);
void bind_build_facts(pybind11::module_& m);    // facts about MPI, compiler, kernels and transports: built, and in use
void bind_gpu(pybind11::module_& m);            // GPUs
void bind_late_views(pybind11::module_& m);     // memory whose views may end without Python's lock
void bind_mxnet(pybind11::module_& m);          // the MXNet of this process
void bind_gradient_norm(pybind11::module_& m);  // mxnet/gradient_norm.h
void bind_timeline(pybind11::module_& m);
// Failing processes end at once and by a signal, so that other processes notice.
void bind_failed_end(pybind11::module_& m);
void bind_mpi_exit(pybind11::module_& m);     // the end of MPI: when Python exits, or when the user finalizes MPI
void bind_stall_watch(pybind11::module_& m);  // the stall watch of all groups, for a thread of Python

// Releases memory whose views have ended (memory.cpp), with the GIL. Python calls it soon on its main thread; call it
// before allocating memory.
void drop_returned_memory();

// Makes all groups leave when MPI is finalized.
void watch_finalize();

}  // namespace mykv
