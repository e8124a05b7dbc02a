#include "runtime/thread_commands.h"

#include <chrono>

#include "base/error.h"

namespace mykv {

namespace {

constexpr auto kAnswerPatience = std::chrono::seconds(3);  // how long to wait for answers from other hosts

}  // namespace

std::atomic<bool>& ThreadCommands::watched() {
  static std::atomic<bool> one{false};
  return one;
}

void ThreadCommands::leave(const std::string& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    leave_reason_ = reason;
  }
  leaving_.store(true);
  table_.bell(world_.local_rank()).ring();
}

std::string ThreadCommands::leave_reason() {
  std::lock_guard<std::mutex> lock(mutex_);
  return leave_reason_;
}

void ThreadCommands::break_down(const Failure& reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // A lost process causes later failures, so its reason stays.
    if (break_down_reason_.empty() || !lost_.load()) break_down_reason_ = reason;
    pending_.store(true, std::memory_order_release);
  }
  table_.bell(world_.local_rank()).ring();
}

void ThreadCommands::lose(const Failure& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  break_down_reason_ = reason;
  lost_.store(true);
}

Failure ThreadCommands::break_down_reason() {
  std::lock_guard<std::mutex> lock(mutex_);
  return break_down_reason_;
}

void ThreadCommands::give_up(const std::vector<std::pair<Key, Failure>>& operations) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    to_give_up_.insert(to_give_up_.end(), operations.begin(), operations.end());
    pending_.store(true, std::memory_order_release);
  }
  table_.bell(world_.local_rank()).ring();
}

std::vector<Inquiry::Answer> ThreadCommands::ask_hosts(const std::vector<Key>& keys) {
  std::lock_guard<std::mutex> asking(asking_mutex_);
  if (requests_.refuses_new()) return {};
  const auto question = std::make_shared<Question>();
  question->keys = keys;
  std::unique_lock<std::mutex> lock(mutex_);
  question_ = question;
  pending_.store(true, std::memory_order_release);
  table_.bell(world_.local_rank()).ring();
  answered_.wait_for(lock, kAnswerPatience, [&] { return question->answers.size() + 1 == world_.hosts().size(); });
  question_.reset();
  return std::move(question->answers);
}

bool ThreadCommands::take() {
  std::deque<std::pair<Key, Failure>> to_give_up;
  std::shared_ptr<Question> question;
  bool ask;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!break_down_reason_.empty()) throw Error(break_down_reason_);
    to_give_up.swap(to_give_up_);
    question = question_;
    ask = question && !std::exchange(question->asked, true);
  }
  // Not under mutex_: rank 0 may need the table's lock here, which a thread may hold for long.
  for (const auto& [key, reason] : to_give_up) agreement_.give_up(key, reason);
  if (ask) inquiry_.ask(question->keys);
  agreement_.progress_sending();
  inquiry_.progress();
  std::vector<Inquiry::Answer> answers;
  if (question) answers = inquiry_.take_answers();
  std::lock_guard<std::mutex> lock(mutex_);
  for (Inquiry::Answer& answer : answers) question->answers.push_back(std::move(answer));
  if (!answers.empty()) answered_.notify_all();
  if (!question_ && to_give_up_.empty() && break_down_reason_.empty() && !agreement_.sending() && !inquiry_.sending()) {
    pending_.store(false, std::memory_order_release);
  }
  return ask || !to_give_up.empty() || !answers.empty();
}

}  // namespace mykv
