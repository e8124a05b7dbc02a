#include "transport/nccl/arrangements.h"

#include <unistd.h>

#include <string>
#include <utility>

#include "base/error.h"
#include "base/mpi_check.h"
#include "gpu/device.h"
#include "gpu/libraries.h"

namespace mykv {

const gpu::Nccl& nccl() {
  const gpu::Nccl* found = gpu::Libraries::get().nccl();
  if (found == nullptr) throw Error(gpu::Libraries::get().nccl_problem());
  return *found;
}

NcclCallGroup::NcclCallGroup() { nccl().check(nccl().group_start(), "ncclGroupStart", nullptr); }

NcclCallGroup::~NcclCallGroup() {
  if (open_) nccl().group_end();
}

void NcclCallGroup::end() {
  open_ = false;
  nccl().check(nccl().group_end(), "ncclGroupEnd", nullptr);
}

NcclCommunicator::NcclCommunicator(const gpu::NcclUniqueId& id, int size, int first, const std::vector<int>& devices)
    : size_(size) {
  for (const int device : devices) locals_.push_back({device, nullptr});
  try {
    NcclCallGroup group;
    for (size_t i = 0; i < locals_.size(); ++i) {
      const gpu::DeviceScope scope(locals_[i].device);
      gpu::Nccl::Config config;
      const int code = nccl().comm_init(&locals_[i].comm, size, id, first + static_cast<int>(i), &config);
      nccl().check(code, "ncclCommInitRankConfig", nullptr);
    }
    group.end();
  } catch (const Error&) {
    abort();
    throw;
  }
}

bool NcclCommunicator::calls_finished(const char* what) const {
  bool all = true;
  for (const Local& local : locals_) {
    int state = gpu::Nccl::kSuccess;
    nccl().check(nccl().comm_get_async_error(local.comm, &state), "ncclCommGetAsyncError", local.comm);
    nccl().check(state, what, local.comm);
    all = all && state != gpu::Nccl::kInProgress;
  }
  return all;
}

void NcclCommunicator::finalize() {
  NcclCallGroup group;
  for (const Local& local : locals_) nccl().check(nccl().comm_finalize(local.comm), "ncclCommFinalize", local.comm);
  group.end();
}

void NcclCommunicator::destroy() {
  for (Local& local : locals_) {
    const gpu::NcclComm comm = std::exchange(local.comm, nullptr);
    nccl().check(nccl().comm_destroy(comm), "ncclCommDestroy", nullptr);
  }
  locals_.clear();
}

void NcclCommunicator::abort() noexcept {
  for (const Local& local : locals_) {
    if (local.comm != nullptr) nccl().comm_abort(local.comm);
  }
  locals_.clear();
}

namespace {

constexpr size_t kRemembered = 4096;  // most arrangements that are kept; all ranks drop them at the same operation

}  // namespace

Arrangements::Arrangements(const World& world)
    : world_(world), comm_(Communicator::duplicate(world.control(), "MPI_Comm_dup for NCCL")) {}

Arrangements::~Arrangements() {
  if (request_ == MPI_REQUEST_NULL && !world_.has_several_hosts()) return;
  comm_.let_go();
  // MPI may still use this memory.
  (void)exchanged_.release();
  (void)mine_.release();
  (void)id_.release();
}

const Arrangement* Arrangements::find(uint64_t digest) const {
  const auto it = known_.find(digest);
  return it == known_.end() ? nullptr : &it->second;
}

void Arrangements::begin(uint64_t digest, Placement mine) {
  identify(&mine);
  digest_ = digest;
  mine_ = std::make_unique<Placement>(mine);
  exchanged_ = std::make_unique<std::vector<Placement>>(static_cast<size_t>(world_.size()));
  check_mpi(MPI_Iallgather(mine_.get(), sizeof mine, MPI_BYTE, exchanged_->data(), sizeof mine, MPI_BYTE, comm_.get(),
                           &request_),
            "MPI_Iallgather for NCCL");
  stage_ = Stage::exchanging;
}

bool Arrangements::tested() {
  int done = 0;
  check_mpi(MPI_Test(&request_, &done, MPI_STATUS_IGNORE), "MPI_Test for NCCL");
  return done != 0;
}

bool Arrangements::step() {
  if (stage_ == Stage::exchanging) {
    if (!tested()) return false;
    arrange();
  }
  if (stage_ == Stage::naming) {
    if (!tested()) return false;
    making_.communicator = std::make_shared<NcclCommunicator>(*id_, size_, first_, mine_->list());
    made_.push_back(making_.communicator);
    by_devices_[devices_] = making_.communicator;
    stage_ = Stage::making;
  }
  if (stage_ == Stage::making && making_.communicator) {
    if (!making_.communicator->calls_finished("ncclCommInitRankConfig")) return false;
  }
  if (known_.size() >= kRemembered) known_.clear();
  known_[digest_] = std::move(making_);
  making_ = Arrangement();
  stage_ = Stage::idle;
  return true;
}

// Derives the arrangement from the placements, and begins a new communicator if one is needed.
void Arrangements::arrange() {
  making_ = Arrangement();
  devices_.clear();
  size_ = 0;
  const std::vector<Placement>& all = *exchanged_;
  for (const Placement& one : all) {
    if (making_.nccl_ranks.size() == static_cast<size_t>(world_.rank())) first_ = size_;
    making_.nccl_ranks.push_back(size_ + one.primary);
    size_ += one.count;
    devices_.push_back(one.count);
    devices_.insert(devices_.end(), one.devices, one.devices + one.count);
    making_.same_layout = making_.same_layout && one.layout == all[0].layout;
    making_.whole_inputs = making_.whole_inputs && one.whole_input != 0;
    making_.whole_outputs = making_.whole_outputs && one.whole_output != 0;
  }
  making_.problem = problem_of(all);
  stage_ = Stage::making;
  if (!making_.problem.empty()) return;
  const auto known = by_devices_.find(devices_);
  if (known != by_devices_.end()) {
    making_.communicator = known->second;
    return;
  }
  id_ = std::make_unique<gpu::NcclUniqueId>();
  if (world_.rank() == 0) nccl().check(nccl().get_unique_id(id_.get()), "ncclGetUniqueId", nullptr);
  check_mpi(MPI_Ibcast(id_.get(), sizeof *id_, MPI_BYTE, 0, comm_.get(), &request_), "MPI_Ibcast for NCCL");
  stage_ = Stage::naming;
}

std::string Arrangements::problem_of(const std::vector<Placement>& all) const {
  for (size_t a = 0; a < all.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      if (all[a].machine != all[b].machine) continue;
      for (int i = 0; i < all[a].count; ++i) {
        for (int k = 0; k < all[b].count; ++k) {
          if (std::string(all[a].bus_ids[i]) != all[b].bus_ids[k]) continue;
          return "ranks " + std::to_string(world_.label(static_cast<int>(b))) + " and " +
                 std::to_string(world_.label(static_cast<int>(a))) + " have their arrays on the same GPU (" +
                 all[a].bus_ids[i] +
                 "), which NCCL does not support: give each rank a GPU of its own, or set MYKV_GPU=host on all ranks";
        }
      }
    }
  }
  return {};
}

void Arrangements::finish(int64_t patience_us) {
  constexpr int64_t kLookUs = 200;
  try {
    for (const auto& one : made_) one->finalize();
    for (const auto& one : made_) {
      while (!one->calls_finished("ncclCommFinalize")) {
        if ((patience_us -= kLookUs) < 0) {
          abort();
          return;
        }
        usleep(kLookUs);
      }
    }
    for (const auto& one : made_) one->destroy();
  } catch (const Error&) {
    abort();
  }
  forget();
}

void Arrangements::abort() noexcept {
  comm_.let_go();
  for (const auto& one : made_) one->abort();
  forget();
}

void Arrangements::forget() noexcept {
  made_.clear();
  by_devices_.clear();
  known_.clear();
}

}  // namespace mykv
