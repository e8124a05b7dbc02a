// The exception type of the core, and the failure that it carries. The text of a failure is for the user. Programs use
// its code and its ranks, and never parse the text.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace mykv {

// Kinds of failures. After the semicolon: the ranks in Failure::ranks, by their numbers in messages (labels).
enum class ErrorCode : uint8_t {
  other,         // wrong arguments, a GPU or the system failed; no ranks
  refused,       // a rank could not take part; that rank
  mismatch,      // ranks ask for different operations under one name; two of them
  departed,      // a rank has left or has failed; that rank
  dead,          // a process has died; its rank, if it is known
  given_up,      // a rank has ended the operation since ranks were missing; those ranks
  deadlock,      // a rank has ended the operation since other ranks wait for it elsewhere; those ranks
  stalled,       // the stall watch has ended the operation; the ranks that it has waited for
  left,          // this rank itself has left; no ranks
  table_locked,  // a rank keeps the host's table locked, or died with the lock; no ranks
  no_memory,     // no ranks
  mpi,           // a call of MPI has failed; no ranks
};
// The values of Error.code in Python, in the order of ErrorCode.
constexpr const char* kErrorCodes[] = {"other",    "refused", "mismatch", "departed",     "dead",      "given_up",
                                       "deadlock", "stalled", "left",     "table_locked", "no_memory", "mpi"};
static_assert(std::size(kErrorCodes) == static_cast<size_t>(ErrorCode::mpi) + 1);

inline const char* name_of(ErrorCode code) { return kErrorCodes[static_cast<size_t>(code)]; }

// Why an operation has no result. Passed between threads, through the host's table and between hosts.
struct Failure {
  Failure() = default;
  Failure(std::string why, ErrorCode kind = ErrorCode::other, std::vector<int> named = {})
      : text(std::move(why)), code(kind), ranks(std::move(named)) {}
  bool empty() const { return text.empty(); }
  bool operator==(const Failure& other) const {
    return text == other.text && code == other.code && ranks == other.ranks;
  }

  std::string text;
  ErrorCode code = ErrorCode::other;
  std::vector<int> ranks;
};

// The same failure with text put before or after.
inline Failure operator+(const std::string& before, Failure failure) {
  failure.text.insert(0, before);
  return failure;
}
inline Failure operator+(Failure failure, const std::string& behind) {
  failure.text += behind;
  return failure;
}

class Error : public std::runtime_error {
 public:
  explicit Error(Failure failure) : std::runtime_error(failure.text), failure_(std::move(failure)) {}
  explicit Error(const std::string& text, ErrorCode code = ErrorCode::other, std::vector<int> ranks = {})
      : Error(Failure(text, code, std::move(ranks))) {}
  const Failure& failure() const { return failure_; }

 private:
  Failure failure_;
};

// An error of a collective call that all ranks get. After any other error, other ranks may still wait.
struct AgreedError : Error {
  using Error::Error;
};

// The failure of an Error; for other exceptions, a failure with their text.
inline Failure failure_of(const std::exception& error) {
  const auto* const own = dynamic_cast<const Error*>(&error);
  if (own != nullptr) return own->failure();
  return Failure(*error.what() != '\0' ? error.what() : "an error without a text");  // an empty text would mean success
}

inline Error system_error(const std::string& what) { return Error(what + ": " + std::strerror(errno)); }

// The Error that says that a rank has left.

// The text of messages when a rank leaves. A reason that begins with "ended with " says how its script ended.
inline std::string departure_text(int rank, const std::string& reason) {
  const bool is_end = reason.rfind("ended with ", 0) == 0;
  return "rank " + std::to_string(rank) + (is_end ? " " : " has left: ") + reason;
}

// `rank`: the label of the rank. The text names the rank and the reason. If a process has died, the text names the
// death, not the ranks that leave because of it.
struct Departed : Error {
  Departed(int gone, Failure why)
      : Error(departure_text(gone, why.text), why.code == ErrorCode::dead ? ErrorCode::dead : ErrorCode::departed,
              why.code == ErrorCode::dead ? why.ranks : std::vector<int>{gone}),
        rank(gone),
        reason(std::move(why)) {}
  int rank;
  Failure reason;
};

}  // namespace mykv
