#include "world/door.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

#include "base/error.h"

namespace mykv {

namespace {

constexpr size_t kMostWaiting = 256;  // callers that have not sent the secret; they must not use up all descriptors
constexpr int kMostAtOnce = 64;       // callers accepted before the connected callers are read again
constexpr int kCrowdedMs = 2;         // pause between two attempts to connect to a crowded door

FileDescriptor unix_socket() { return FileDescriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

// An abstract name (leading zero byte) needs no directory and vanishes with the socket.
socklen_t address_of(const Token& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  char* text = address->sun_path + 1;
  int n = std::snprintf(text, sizeof address->sun_path - 1, "mykv-");
  for (unsigned char byte : name.bytes)
    n += std::snprintf(text + n, sizeof address->sun_path - 1 - static_cast<size_t>(n), "%02x", byte);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(n));
}

bool same_user(int connection) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

bool readable(int fd, int ms) {
  pollfd p{fd, POLLIN, 0};
  int n;
  do {
    n = poll(&p, 1, ms);
  } while (n < 0 && errno == EINTR);
  return n == 1;
}

// A message of one byte with room for one descriptor.
struct DescriptorMessage {
  DescriptorMessage() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = CMSG_LEN(sizeof(int));  // not CMSG_SPACE, whose padding has room for a second descriptor
  }
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;

  char byte = 'm';
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
};

bool send_descriptor(int connection, int fd) {
  DescriptorMessage out;
  cmsghdr* header = CMSG_FIRSTHDR(&out.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  return sendmsg(connection, &out.message, MSG_NOSIGNAL) == 1;
}

}  // namespace

Token random_token() {
  Token token;
  if (getrandom(&token, sizeof token, 0) != static_cast<ssize_t>(sizeof token)) {
    throw system_error("mykv cannot get random bytes");
  }
  return token;
}

bool equal(const Token& a, const Token& b) {
  volatile unsigned char differ = 0;
  for (size_t i = 0; i < sizeof a.bytes; ++i) differ = static_cast<unsigned char>(differ | (a.bytes[i] ^ b.bytes[i]));
  return differ == 0;
}

bool Door::open(const Token& name, std::string* refused) {
  listener_ = unix_socket();
  sockaddr_un address;
  const socklen_t length = address_of(name, &address);
  if (!listener_ || bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener_.get(), SOMAXCONN) != 0) {
    *refused = system_error("mykv cannot open a Unix socket for the ranks of this host").what();
    return false;
  }
  return true;
}

void Door::attend(const Token& secret, int fd, int ms) {
  std::vector<pollfd> events{{listener_.get(), POLLIN, 0}};
  for (const Caller& caller : waiting_) events.push_back({caller.connection.get(), POLLIN, 0});
  if (poll(events.data(), events.size(), ms) <= 0) return;
  auto event = events.begin() + 1;
  for (auto caller = waiting_.begin(); caller != waiting_.end(); ++event) {
    caller = event->revents != 0 && hear(*caller, secret, fd) ? waiting_.erase(caller) : std::next(caller);
  }
  if (events[0].revents != 0) let_in();
}

void Door::let_in() {
  for (int i = 0; i < kMostAtOnce; ++i) {
    Caller caller;
    caller.connection = FileDescriptor(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    // If too many callers wait, or descriptors are used up, the caller that connected first is dropped.
    const bool crowded = caller.connection ? waiting_.size() >= kMostWaiting : errno == EMFILE || errno == ENFILE;
    if (crowded && !waiting_.empty()) {
      waiting_.pop_front();
      ++rejected_callers_;
    }
    if (!caller.connection) {
      if (crowded) usleep(1000);
      return;
    }
    if (same_user(caller.connection.get())) {
      waiting_.push_back(std::move(caller));
    } else {
      ++rejected_callers_;
    }
  }
}

// Reads what the caller has sent. Returns whether the caller was served or rejected.
bool Door::hear(Caller& caller, const Token& secret, int fd) {
  const size_t left = sizeof caller.said - caller.bytes;
  const ssize_t some = recv(caller.connection.get(), caller.said.bytes + caller.bytes, left, 0);
  if (some < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (some > 0) caller.bytes += static_cast<size_t>(some);
  if (some > 0 && caller.bytes < sizeof caller.said) return false;
  if (caller.bytes == sizeof caller.said && equal(caller.said, secret)) {
    send_descriptor(caller.connection.get(), fd);  // fails if the rank has died since it called
    ++served_;
  } else {
    ++rejected_callers_;
  }
  return true;
}

FileDescriptor knock(const Token& name) {
  FileDescriptor connection = unix_socket();
  if (!connection) return {};
  sockaddr_un address;
  const socklen_t length = address_of(name, &address);
  const auto over = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  while (connect(connection.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    // EAGAIN: more callers wait at the door than the system allows.
    if ((errno != EAGAIN && errno != EINTR) || std::chrono::steady_clock::now() > over) return {};
    usleep(kCrowdedMs * 1000);
  }
  return connection;
}

FileDescriptor call(const Token& name, const Token& secret) {
  FileDescriptor connection = knock(name);
  if (!connection || !same_user(connection.get())) return {};
  if (send(connection.get(), &secret, sizeof secret, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof secret)) return {};
  return connection;
}

FileDescriptor receive_descriptor(int connection) {
  DescriptorMessage in;
  // Longer than the rank that hands the descriptor out waits for callers.
  if (!readable(connection, 2 * kPatienceMs) || recvmsg(connection, &in.message, MSG_CMSG_CLOEXEC) != 1) return {};
  const cmsghdr* header = CMSG_FIRSTHDR(&in.message);
  if (header == nullptr || header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS ||
      header->cmsg_len != CMSG_LEN(sizeof(int))) {
    return {};
  }
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return FileDescriptor(fd);
}

}  // namespace mykv
