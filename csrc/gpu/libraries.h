// The CUDA runtime and NCCL of this process, if it has them. They are loaded once, before the first world.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "gpu/cuda_api.h"
#include "gpu/nccl_api.h"

namespace mykv::gpu {

class Libraries {
 public:
  // Loads the first usable candidate (names as in Library) for CUDA and for NCCL. Later calls are no-ops.
  static const Libraries& load(const std::vector<std::string>& cuda, const std::vector<std::string>& nccl);
  // The loaded libraries; none before load().
  static const Libraries& get();

  const Cuda* cuda() const { return cuda_.get(); }  // null: see cuda_problem()
  const Nccl* nccl() const { return nccl_.get(); }
  const std::string& cuda_problem() const { return cuda_problem_; }
  const std::string& nccl_problem() const { return nccl_problem_; }

 private:
  std::unique_ptr<Cuda> cuda_;
  std::unique_ptr<Nccl> nccl_;
  std::string cuda_problem_ = "the CUDA runtime was not looked for";
  std::string nccl_problem_ = "NCCL was not looked for";
};

// The CUDA runtime; throws Error if there is none.
const Cuda& cuda();

}  // namespace mykv::gpu
