#include "python/attached_bridge.h"

#include <utility>

#include "base/error.h"
#include "base/forks.h"

namespace mykv {

namespace {

std::unique_ptr<mxnet::Bridge>& g_bridge = *new std::unique_ptr<mxnet::Bridge>;

}  // namespace

const mxnet::Bridge& bridge() {
  if (!g_bridge) throw Error("mykv is not attached to MXNet");
  return *g_bridge;
}

void attach_bridge(std::unique_ptr<mxnet::Bridge> made) {
  if (g_bridge) keep_forever(std::move(g_bridge));  // another thread may be in a push, without the GIL
  g_bridge = std::move(made);
}

}  // namespace mykv
