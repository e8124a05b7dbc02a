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
  for (unsigned char byte : name.bytes)
    n += std::snprintf(text + n, sizeof address->sun_path - 1 - static_cast<size_t>(n), "%02x", byte);
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

// A message of one byte with room for one descriptor beside it.
struct DescriptorMessage {
  DescriptorMessage() {
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
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

FileDescriptor receive_descriptor(int connection) {
  DescriptorMessage in;
  if (!readable(connection) || recvmsg(connection, &in.message, MSG_CMSG_CLOEXEC) != 1) return {};
  const cmsghdr* header = CMSG_FIRSTHDR(&in.message);
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

// What rank 0 tells the others: where to call, the job's secret, whether there is a segment, and whether to call.
struct Offer {
  Token name{};
  Token secret{};
  int made = 0;
  int shared = 0;
};

// Leaves in *refused why the system allows no such socket.
FileDescriptor listen_under(const Token& name, int callers, std::string* refused) {
  FileDescriptor listener = unix_socket();
  sockaddr_un address;
  const socklen_t length = address_of(name, &address);
  if (!listener || bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener.get(), callers) != 0) {
    *refused = system_error("mykv cannot open a Unix socket for the ranks of this host").what();
    return {};
  }
  return listener;
}

Handover give(MPI_Comm comm, int size, size_t bytes, Segment* segment) {
  Offer offer;
  Handover mine;
  FileDescriptor listener;
  try {
    *segment = Segment::create(bytes, &mine.lonely);
    segment->commit(0, 4096);
    if (getrandom(&offer.name, sizeof offer.name, 0) < 0 || getrandom(&offer.secret, sizeof offer.secret, 0) < 0) {
      throw system_error("mykv cannot get random bytes");
    }
    if (mine.lonely.empty()) listener = listen_under(offer.name, size, &mine.lonely);
    offer.made = 1;
    offer.shared = mine.lonely.empty();
  } catch (const Error& error) {
    mine = {Handover::Result::failed, error.what(), ""};
  }
  if (size == 1) return mine;
  MPI_Bcast(&offer, sizeof offer, MPI_BYTE, 0, comm);
  if (!offer.made || !offer.shared) return mine;
  int callers = 0;
  const int self = 0;
  MPI_Allreduce(&self, &callers, 1, MPI_INT, MPI_SUM, comm);
  serve(listener.get(), offer.secret, segment->fd(), callers);
  return mine;
}

Handover take(MPI_Comm comm, Segment* segment) {
  Offer offer;
  MPI_Bcast(&offer, sizeof offer, MPI_BYTE, 0, comm);
  if (!offer.made) return {Handover::Result::failed, "", ""};
  if (!offer.shared) return {Handover::Result::separate, "", ""};
  // All connect before the first is served: the connections queue at the listener, so nobody waits for one that
  // never comes.
  const FileDescriptor connection = call(offer.name, offer.secret);
  const int connected = connection ? 1 : 0;
  int callers = 0;
  MPI_Allreduce(&connected, &callers, 1, MPI_INT, MPI_SUM, comm);
  if (!connection) return {Handover::Result::separate, "", ""};
  FileDescriptor fd = receive_descriptor(connection.get());
  if (!fd) return {Handover::Result::separate, "", ""};
  try {
    *segment = Segment::map(std::move(fd));
  } catch (const Error& error) {
    return {Handover::Result::failed, error.what(), ""};
  }
  return {};
}

}  // namespace

Handover hand_over(MPI_Comm comm, size_t bytes, Segment* segment) {
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  return rank == 0 ? give(comm, size, bytes, segment) : take(comm, segment);
}

}  // namespace mykv
