// Messages to other ranks that are on their way. Their bytes are kept until MPI does not read them any more.
#pragma once

#include <mpi.h>

#include <list>
#include <memory>
#include <vector>

namespace mykv {

class Sendings {
 public:
  using Bytes = std::shared_ptr<const std::vector<char>>;

  explicit Sendings(MPI_Comm comm) : comm_(comm) {}
  Sendings(const Sendings&) = delete;
  Sendings& operator=(const Sendings&) = delete;
  ~Sendings();

  void send(Bytes bytes, int to, int tag);
  // Moves the messages, and forgets those that are sent.
  void progress();
  bool empty() const { return all_.empty(); }

 private:
  struct Sending {
    Bytes bytes;
    MPI_Request request;
  };
  MPI_Comm comm_;
  std::list<Sending> all_;
};

}  // namespace mykv
