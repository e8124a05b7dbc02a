// Sends and receives.
#include <algorithm>
#include <cstring>

#include "nccl.h"

namespace standin {
namespace {

// The sends and receives of one group: all go on at once, those with the same peer one after the other.
class Messages {
 public:
  Messages(Comm& comm, const std::vector<Operation>& operations) : comm_(comm), meeting_(*comm.meeting) {
    for (const Operation& operation : operations) {
      const void* buffer = operation.kind == kSend ? operation.send : operation.receive;
      auto& queue = operation.kind == kSend ? sends_[operation.root] : receives_[operation.root];
      queue.push_back({static_cast<char*>(cuda().alias(buffer)), operation.count * size_of(operation.type), 0,
                       operation.type, false});
    }
  }

  void run() {
    while (!sends_.empty() || !receives_.empty()) {
      bool moved = false;
      if (!comm_.wait([&] {
            moved = step();
            return moved || broken_;
          }) ||
          broken_)
        return;
      meeting_.ring();
    }
  }

 private:
  struct Message {
    char* buffer;
    uint64_t bytes;
    uint64_t done;
    Type type;
    bool begun;
  };
  using Queues = std::map<int, std::vector<Message>>;

  bool step() {
    bool moved = false;
    for (auto queue = sends_.begin(); queue != sends_.end();) {
      moved |= send(queue->first, queue->second.front()) && pop(queue->second);
      queue = queue->second.empty() ? sends_.erase(queue) : std::next(queue);
    }
    for (auto queue = receives_.begin(); queue != receives_.end();) {
      moved |= receive(queue->first, queue->second.front()) && pop(queue->second);
      queue = queue->second.empty() ? receives_.erase(queue) : std::next(queue);
    }
    bool progress = moved || progress_;
    progress_ = false;
    return progress;
  }

  static bool pop(std::vector<Message>& queue) {
    queue.erase(queue.begin());
    return true;
  }

  // True when the whole message was taken by the receiver.
  bool send(int peer, Message& message) {
    Channel& channel = meeting_.channel(comm_.rank, peer);
    if (channel.broken) {
      comm_.fail(kInvalidUsage);
      broken_ = true;
      return false;
    }
    if (channel.full) return false;
    if (message.begun && message.done == message.bytes) return true;
    channel.type = message.type;
    channel.total = message.bytes;
    channel.bytes = std::min<uint64_t>(kChannelBytes, message.bytes - message.done);
    std::memcpy(meeting_.channel_data(comm_.rank, peer), message.buffer + message.done, channel.bytes);
    message.done += channel.bytes;
    message.begun = true;
    channel.full = 1;
    progress_ = true;
    return false;
  }

  bool receive(int peer, Message& message) {
    Channel& channel = meeting_.channel(peer, comm_.rank);
    if (!channel.full) return false;
    if (channel.total != message.bytes || channel.type != message.type) {
      violation(comm_, "Recv of " + std::to_string(message.bytes) + " bytes of dtype " + std::to_string(message.type) +
                           " meets rank " + std::to_string(peer) + "'s Send of " + std::to_string(channel.total) +
                           " bytes of dtype " + std::to_string(channel.type));
      channel.broken = 1;
      meeting_.ring();
      broken_ = true;
      return false;
    }
    std::memcpy(message.buffer + message.done, meeting_.channel_data(peer, comm_.rank), channel.bytes);
    message.done += channel.bytes;
    channel.full = 0;
    progress_ = true;
    return message.done == message.bytes;
  }

  Comm& comm_;
  Meeting& meeting_;
  Queues sends_, receives_;
  bool progress_ = false;
  bool broken_ = false;
};

}  // namespace

void run_messages(Comm& comm, const std::vector<Operation>& operations) { Messages(comm, operations).run(); }

}  // namespace standin
