#include "transport/host/handover.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "runtime/error.h"

namespace mykv {

namespace {

constexpr int kPatienceMs = 10000;  // between two ranks of one machine that both are in this function

struct Token {
  unsigned char bytes[16];
};

FileDescriptor unix_socket() { return FileDescriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

// An abstract name (leading zero byte) needs no directory and vanishes with the socket.
socklen_t address_of(const Token& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  char* text = address->sun_path + 1;
  int n = std::snprintf(text, sizeof address->sun_path - 1, "mykv-");
  for (unsigned char byte : name.bytes) n += std::snprintf(text + n, sizeof address->sun_path - 1 - static_cast<size_t>(n), "%02x", byte);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + static_cast<size_t>(n));
}

bool same_user(int connection) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

bool readable(int fd) {
  pollfd p{fd, POLLIN, 0};
  int n;
  do {
    n = poll(&p, 1, kPatienceMs);
  } while (n < 0 && errno == EINTR);
  return n == 1;
}

bool send_descriptor(int connection, int fd) {
  char byte = 'm';
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  return sendmsg(connection, &message, MSG_NOSIGNAL) == 1;
}

FileDescriptor receive_descriptor(int connection) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  if (!readable(connection) || recvmsg(connection, &message, MSG_CMSG_CLOEXEC) != 1) return {};
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(sizeof(int))) return {};
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
  return FileDescriptor(fd);
}

// Serves the segment to `callers` connections that prove to be of this job.
void serve(int listener, const Token& secret, int fd, int callers) {
  while (callers > 0 && readable(listener)) {
    FileDescriptor connection(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    Token token{};
    if (!connection || !same_user(connection.get()) || !readable(connection.get())) continue;
    if (recv(connection.get(), &token, sizeof token, MSG_WAITALL) != static_cast<ssize_t>(sizeof token)) continue;
    if (std::memcmp(&token, &secret, sizeof token) != 0) continue;
    --callers;
    send_descriptor(connection.get(), fd);
  }
}

FileDescriptor call(const Token& name, const Token& secret) {
  FileDescriptor connection = unix_socket();
  sockaddr_un address;
  const socklen_t length = address_of(name, &address);
  if (!connection || connect(connection.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) return {};
  if (!same_user(connection.get())) return {};
  if (send(connection.get(), &secret, sizeof secret, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof secret)) return {};
  return connection;
}

}  // namespace

bool hand_over(MPI_Comm comm, Segment* segment) {
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  if (size == 1) return true;

  Token tokens[2] = {};  // the socket's name and the job's secret
  FileDescriptor listener;
  if (rank == 0) {
    if (getrandom(tokens, sizeof tokens, 0) != static_cast<ssize_t>(sizeof tokens)) throw system_error("mykv cannot get random bytes");
    listener = unix_socket();
    sockaddr_un address;
    const socklen_t length = address_of(tokens[0], &address);
    if (!listener || bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(listener.get(), size) != 0) {
      throw system_error("mykv cannot open a Unix socket for the ranks of this host");
    }
  }
  MPI_Bcast(tokens, sizeof tokens, MPI_BYTE, 0, comm);
  // All connect before the first is served: the connections queue at the listener, so nobody waits for one that
  // never comes.
  FileDescriptor connection;
  if (rank != 0) connection = call(tokens[0], tokens[1]);
  const int connected = connection ? 1 : 0;
  int callers = 0;
  MPI_Allreduce(&connected, &callers, 1, MPI_INT, MPI_SUM, comm);
  if (rank == 0) {
    serve(listener.get(), tokens[1], segment->fd(), callers);
    return true;
  }
  if (!connection) return false;
  FileDescriptor fd = receive_descriptor(connection.get());
  if (!fd) return false;
  *segment = Segment::map(std::move(fd));
  return true;
}

}  // namespace mykv
