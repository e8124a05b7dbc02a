// The door at which the ranks of a host call for their segment: a Unix socket in the abstract namespace, which any
// process of the machine may knock at, in any number and with anything to say. A descriptor is handed only to callers
// of the same user that know the job's secret, and nobody else keeps them waiting.
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

// Throws Error where the system has no random bytes.
Token random_token();
// In a time that does not tell where they differ.
bool equal(const Token& a, const Token& b);

// How long ranks of one machine wait for each other, when all are known to be at it.
constexpr int kPatienceMs = 10000;

class Door {
 public:
  // Leaves in *refused why the system allows no such socket; then the door is shut.
  bool open(const Token& name, std::string* refused);
  // Lets those in who call in the next `ms` milliseconds, or returns sooner, and hands them `fd`.
  void attend(const Token& secret, int fd, int ms);
  // Callers with the secret, which were handed the descriptor unless they have died meanwhile.
  int served() const { return served_; }
  // Callers that were not: of another user, without the secret, or silent to this moment.
  int strangers() const { return strangers_ + static_cast<int>(waiting_.size()); }

 private:
  // Has not said the secret yet.
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
  int strangers_ = 0;
};

// A connection to the door of this name, on which nothing was said.
FileDescriptor knock(const Token& name);
// Calls at the door of this name and says the secret, unless a process of another user opened it. None where there is
// no such door in this network namespace, or it stays crowded.
FileDescriptor call(const Token& name, const Token& secret);
// The descriptor that comes over the connection, closed on exec; none where none comes.
FileDescriptor receive_descriptor(int connection);

}  // namespace mykv
