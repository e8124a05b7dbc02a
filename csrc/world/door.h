// The door at which the ranks of a host ask for their segment: a Unix socket in the abstract namespace. Any process of
// the machine may connect to it, any number of times, and send anything. The descriptor is handed only to callers of
// the same user that know the job's secret, and other callers cannot delay them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <string>

#include "base/file_descriptor.h"

namespace mykv {

struct Token {
  unsigned char bytes[16];
};

// Throws Error if the system has no random bytes.
Token random_token();
// Compares in constant time, so that the time does not reveal where the tokens differ.
bool equal(const Token& a, const Token& b);

// How long ranks of one machine wait for each other after all ranks have called the door.
constexpr int kPatienceMs = 10000;

class Door {
 public:
  // False if the system allows no such socket; *refused then has the reason.
  bool open(const Token& name, std::string* refused);
  // Waits at most `ms` milliseconds for callers, and hands `fd` to callers with the secret.
  void attend(const Token& secret, int fd, int ms);
  // The number of callers with the secret. They were handed the descriptor unless they have died meanwhile.
  int served() const { return served_; }
  // The number of other callers: processes of another user, processes without the secret, and callers that are still
  // silent.
  int rejected_callers() const { return rejected_callers_ + static_cast<int>(waiting_.size()); }

 private:
  // A caller that has not sent the secret yet.
  struct Caller {
    FileDescriptor connection;
    Token said{};
    size_t bytes = 0;
  };
  void let_in();
  bool hear(Caller& caller, const Token& secret, int fd);

  FileDescriptor listener_;
  std::list<Caller> waiting_;
  int served_ = 0;
  int rejected_callers_ = 0;
};

// A connection to the door of this name, over which nothing is sent.
FileDescriptor knock(const Token& name);
// Connects to the door of this name and sends the secret, unless a process of another user opened it. Empty if there is
// no such door in this network namespace, or it stays crowded.
FileDescriptor call(const Token& name, const Token& secret);
// The descriptor received over the connection, closed on exec; empty if none comes.
FileDescriptor receive_descriptor(int connection);

}  // namespace mykv
