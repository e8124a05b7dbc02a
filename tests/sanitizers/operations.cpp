// Random operations of several ranks, checked against sums that are computed here.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "ranks.h"
#include "runtime/stall_watch.h"
#include "scenarios.h"
#include "timeline/timeline.h"

namespace mykv::testing {

namespace {

enum class Form { sum, sum_in_place, broadcast, reduce_shards, gather_shards };
constexpr Form kForms[] = {Form::sum, Form::sum_in_place, Form::broadcast, Form::reduce_shards, Form::gather_shards};
// Elements of 4 bytes: within the limit of what is done by whom comes last, above it, several parts, several chunks.
constexpr size_t kCounts[] = {1, 33, 4096, 8192, 8193, 30000, 70001, 200000};

struct Task {
  std::string name;
  Form form;
  size_t count;
  int root;
  int32_t priority;
  uint32_t seed;  // of its values
};

int32_t value_of(const Task& task, int rank, size_t element) {
  return static_cast<int32_t>((element * 7 + static_cast<size_t>(rank) * 3 + task.seed) % 1001) - 500;
}

// Each rank has an equal share, the last one what remains; some shares are empty.
std::shared_ptr<const std::vector<Shard>> shards_of(const Task& task, int size) {
  auto shards = std::make_shared<std::vector<Shard>>();
  const size_t each = task.count / static_cast<size_t>(size);
  for (int r = 0; r < size; ++r) {
    const size_t begin = each * static_cast<size_t>(r);
    shards->push_back({begin, r + 1 == size ? task.count - begin : each, r});
  }
  return shards;
}

// What one rank brings to a task, and gets.
struct Share {
  Share(Runtime& runtime, const Task& task)
      : task_(task), rank_(runtime.world().rank()), size_(runtime.world().size()) {
    const Kind kind = task.form == Form::broadcast || task.form == Form::gather_shards ? Kind::broadcast
                      : task.form == Form::reduce_shards                               ? Kind::reduce
                                                                                       : Kind::allreduce;
    request = request_of(runtime, task.name, kind, task.count, task.root);
    request.operation.priority = task.priority;
    if (task.form == Form::sum_in_place) {
      buffer_ = std::make_shared<Buffer>(runtime.shared_from_this(), task.count * sizeof(int32_t));
      std::thread other([this] { buffer_->commit(buffer_->bytes() / 2); });  // as any thread of a program's may
      buffer_->commit(buffer_->bytes());
      other.join();
      data_ = reinterpret_cast<int32_t*>(buffer_->data());
      request.operation.in_place = true;
      request.in_place = buffer_->offset();
    } else {
      input_.resize(task.count);
      values_.assign(task.count, -1);
      data_ = input_.data();
      attach(runtime);
    }
    for (size_t i = 0; i < task.count; ++i) data_[i] = value_of(task, rank_, i);
    request.done = outcome.done();
  }

  void check() const {
    const int32_t* result = task_.form == Form::sum_in_place ? data_ : values_.data();
    const auto shards = shards_of(task_, size_);
    for (size_t i = 0; i < task_.count; ++i) {
      int32_t wanted = 0;
      for (int r = 0; r < size_; ++r) wanted += value_of(task_, r, i);
      if (task_.form == Form::broadcast) wanted = value_of(task_, task_.root, i);
      if (task_.form == Form::gather_shards) wanted = value_of(task_, owner_of(*shards, i), i);
      if (task_.form == Form::reduce_shards && owner_of(*shards, i) != rank_) wanted = -1;  // untouched
      require(result[i] == wanted, task_.name + ", element " + std::to_string(i) + " on rank " + std::to_string(rank_) +
                                       ": " + std::to_string(result[i]) + " and not " + std::to_string(wanted));
    }
  }

  Request request;
  Outcome outcome;

 private:
  static int owner_of(const std::vector<Shard>& shards, size_t element) {
    return std::find_if(shards.begin(), shards.end(), [&](const Shard& s) { return element < s.begin + s.count; })
        ->root;
  }

  void attach(Runtime& runtime) {
    if (task_.form == Form::sum || task_.form == Form::broadcast) {
      request.inputs = {input_.data()};
      request.outputs = {values_.data()};
      return;
    }
    request.shards = shards_of(task_, size_);
    request.scattered = true;
    const Shard& mine = (*request.shards)[static_cast<size_t>(runtime.world().rank())];
    if (task_.form == Form::gather_shards) {
      request.sources = {{mine.begin, mine.count, input_.data() + mine.begin}};
      request.targets = {{0, task_.count, values_.data()}};
    } else {
      request.sources = {{0, task_.count, input_.data()}};
      request.targets = {{mine.begin, mine.count, values_.data() + mine.begin}};
    }
  }

  const Task& task_;
  int rank_;
  int size_;
  std::shared_ptr<Buffer> buffer_;
  std::vector<int32_t> input_;
  std::vector<int32_t> values_;
  int32_t* data_;
};

std::vector<Task> draw_tasks(Random& random, int size, size_t n) {
  std::vector<Task> tasks;
  for (size_t k = 0; k < n; ++k) {
    Task task;
    task.form = kForms[below(random, std::size(kForms))];
    task.count = kCounts[below(random, std::size(kCounts))];
    task.root = static_cast<int>(below(random, static_cast<size_t>(size)));
    task.priority = static_cast<int32_t>(below(random, 3));
    task.seed = random();
    task.name = "task" + std::to_string(k);
    tasks.push_back(task);
  }
  return tasks;
}

void pause_sometimes(Random& random) {
  if (below(random, 4) == 0) usleep(static_cast<useconds_t>(below(random, 300)));
}

// Some rounds of the same names, so that entries, slots and turns are used again. In each rank two threads post, as
// threads of MXNet's engine do, each its half of the tasks in an order of its own.
void run_rounds(Ranks& ranks, uint32_t seed, int rounds, size_t tasks_each) {
  Random random(seed);
  for (int round = 0; round < rounds; ++round) {
    const std::vector<Task> tasks = draw_tasks(random, ranks.size(), tasks_each);
    Ranks::parallel(2 * ranks.size(), [&](int thread) {
      const int rank = thread / 2;
      Random mine(seed + static_cast<uint32_t>(100 * round + thread));
      std::vector<std::unique_ptr<Share>> shares;
      for (size_t k = static_cast<size_t>(thread % 2); k < tasks.size(); k += 2) {
        shares.push_back(std::make_unique<Share>(ranks[rank], tasks[k]));
      }
      std::shuffle(shares.begin(), shares.end(), mine);
      for (const auto& share : shares) {
        pause_sometimes(mine);
        ranks[rank].post(std::move(share->request));
      }
      for (const auto& share : shares) {
        const std::optional<std::string> error = share->outcome.wait("an operation");
        require(!error, "an operation failed: " + error.value_or(""));
        share->check();
      }
    });
  }
}

// Looks at a runtime all the while, as the stall watch and the timeline's questions do.
class Watcher {
 public:
  explicit Watcher(Runtime& runtime)
      : thread_([this, &runtime] {
          StallWatch watch;
          while (!over_.load()) {
            runtime.longest_wait();
            runtime.waiting(0, "");
            runtime.waiting_for_this({"task0", "task1", "no such task"}, "");
            watch.look(runtime, StallLimits{60, 0}, 0);
            usleep(500);
          }
        }) {}
  ~Watcher() {
    over_.store(true);
    thread_.join();
  }

 private:
  std::atomic<bool> over_{false};
  std::thread thread_;
};

}  // namespace

void random_operations(uint32_t seed) {
  Random random(seed);
  RuntimeOptions options;
  // Little memory for parts: they wait for room, and go beyond it when nothing moves.
  options.part_bytes = (size_t{64} << 10) << below(random, 4);
  options.staging_bytes = options.part_bytes << below(random, 3);
  if (below(random, 2) == 0) options.world.table_capacity = 1;  // 16 for each rank: most find none at first
  Ranks ranks(below(random, 4) == 0 ? 2 : 3, options);
  Watcher watcher(ranks[static_cast<int>(below(random, static_cast<size_t>(ranks.size())))]);
  run_rounds(ranks, seed, 2, 14);
}

void operations_on_a_timeline(uint32_t seed) {
  char path[] = "/tmp/mykv-timeline-XXXXXX";
  FileDescriptor file(mkstemp(path));
  require(static_cast<bool>(file), "no file for the timeline");
  unlink(path);
  Ranks ranks(3);
  std::atomic<bool> over{false};
  std::thread recorder([&] {
    Random random(seed);
    while (!over.load()) {
      if (Timeline::instance().start(FileDescriptor(dup(file.get())), "{}", true) != 0) return;
      usleep(static_cast<useconds_t>(2000 + below(random, 20000)));
      Timeline::instance().stop();
    }
  });
  try {
    run_rounds(ranks, seed, 2, 8);
  } catch (...) {
    over.store(true);
    recorder.join();
    throw;
  }
  over.store(true);
  recorder.join();
}

}  // namespace mykv::testing
