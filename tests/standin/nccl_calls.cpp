// NCCL's functions that communicate, its groups and its operators.
#include "nccl.h"

using namespace standin;

namespace {

int enqueue(const char* function, void* handle, Operation operation, int type, int op) {
  int planted = entered(function);
  if (planted != kSuccess) return group_fail(planted);
  CommPointer comm = find_comm(handle);
  if (!comm) return group_fail(no_comm(handle));
  int result = ensure_ready(*comm);
  if (result != kSuccess) return group_fail(result);
  if (comm->finalized) return group_fail(failed(kInvalidUsage, "%s : the communicator has been finalized", function));
  if (type < 0 || type >= kTypes) return group_fail(failed(kInvalidArgument, "%s : invalid type %d", function, type));
  if (operation.root < 0 || operation.root >= comm->size)
    return group_fail(failed(kInvalidArgument, "%s : invalid root %d (root should be in the 0..%d range)", function,
                             operation.root, comm->size));
  operation.type = static_cast<Type>(type);
  if (op >= 0 && op < kPreMulSum) {
    operation.reduction.op = static_cast<Op>(op);
  } else {
    size_t index = static_cast<size_t>(op - kPreMulSum);
    if (op < 0 || index >= comm->scalars.size() || !comm->scalars[index].used)
      return group_fail(failed(kInvalidArgument, "%s : invalid reduction operation %d", function, op));
    const Scalar& scalar = comm->scalars[index];
    if (scalar.type != operation.type)
      return group_fail(failed(kInvalidArgument, "%s : reduction operation %d is of another type", function, op));
    operation.reduction = {kPreMulSum, scalar.value, scalar.on_device, scalar.type};
  }
  bool message = operation.kind == kSend || operation.kind == kRecv;
  if (operation.count == 0 && !message) return kSuccess;
  return add_call({comm, operation});
}

}  // namespace

STANDIN_API int ncclAllReduce(const void* send, void* receive, size_t count, int type, int op, void* comm,
                              void* stream) {
  return enqueue(__func__, comm, {kAllReduce, send, receive, count, {}, {}, 0, stream}, type, op);
}

STANDIN_API int ncclReduce(const void* send, void* receive, size_t count, int type, int op, int root, void* comm,
                           void* stream) {
  return enqueue(__func__, comm, {kReduce, send, receive, count, {}, {}, root, stream}, type, op);
}

STANDIN_API int ncclBroadcast(const void* send, void* receive, size_t count, int type, int root, void* comm,
                              void* stream) {
  return enqueue(__func__, comm, {kBroadcast, send, receive, count, {}, {}, root, stream}, type, kSum);
}

STANDIN_API int ncclAllGather(const void* send, void* receive, size_t count, int type, void* comm, void* stream) {
  return enqueue(__func__, comm, {kAllGather, send, receive, count, {}, {}, 0, stream}, type, kSum);
}

STANDIN_API int ncclReduceScatter(const void* send, void* receive, size_t count, int type, int op, void* comm,
                                  void* stream) {
  return enqueue(__func__, comm, {kReduceScatter, send, receive, count, {}, {}, 0, stream}, type, op);
}

STANDIN_API int ncclSend(const void* send, size_t count, int type, int peer, void* comm, void* stream) {
  return enqueue(__func__, comm, {kSend, send, nullptr, count, {}, {}, peer, stream}, type, kSum);
}

STANDIN_API int ncclRecv(void* receive, size_t count, int type, int peer, void* comm, void* stream) {
  return enqueue(__func__, comm, {kRecv, nullptr, receive, count, {}, {}, peer, stream}, type, kSum);
}

STANDIN_API int ncclGroupStart(void) {
  if (int code = entered(__func__)) return code;
  return group_start();
}

STANDIN_API int ncclGroupEnd(void) {
  int code = entered(__func__);
  if (code != kSuccess) group_fail(code);  // nothing of the group is done
  return group_end();
}

STANDIN_API int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, void* handle) {
  if (int code = entered(__func__)) return code;
  CommPointer comm = find_comm(handle);
  if (!comm) return no_comm(handle);
  if (int code = ensure_ready(*comm)) return code;
  if (!op || !scalar || type < 0 || type >= kTypes || (residence != 0 && residence != 1))
    return failed(kInvalidArgument, "RedOpCreatePreMulSum : invalid argument");
  Scalar made;
  made.used = true;
  made.type = static_cast<Type>(type);
  if (residence == 1)
    made.value = read_scalar(scalar, made.type);
  else
    made.on_device = scalar;
  size_t index = 0;
  while (index < comm->scalars.size() && comm->scalars[index].used) ++index;
  if (index == comm->scalars.size()) comm->scalars.emplace_back();
  comm->scalars[index] = made;
  *op = kPreMulSum + static_cast<int>(index);
  return kSuccess;
}

STANDIN_API int ncclRedOpDestroy(int op, void* handle) {
  if (int code = entered(__func__)) return code;
  CommPointer comm = find_comm(handle);
  if (!comm) return no_comm(handle);
  size_t index = static_cast<size_t>(op - kPreMulSum);
  if (op < kPreMulSum) return failed(kInvalidArgument, "ncclRedOpDestroy : operator is a NCCL builtin.");
  if (index >= comm->scalars.size() || !comm->scalars[index].used)
    return failed(kInvalidArgument, "ncclRedOpDestroy : operator unknown to this communicator");
  comm->scalars[index].used = false;
  return kSuccess;
}
