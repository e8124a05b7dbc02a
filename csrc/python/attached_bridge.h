// The bridge to the MXNet of this process.
#pragma once

#include <memory>

#include "mxnet/bridge.h"

namespace mykv {

// The bridge of attach_mxnet(); never destroyed, since the engine may hold on to it at exit.
void attach_bridge(std::unique_ptr<mxnet::Bridge> bridge);
// Throws Error before attach_bridge().
const mxnet::Bridge& bridge();

}  // namespace mykv
