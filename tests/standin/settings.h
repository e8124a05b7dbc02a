// The environment of the stand-ins, read when it is first needed.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace standin {

inline long setting(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtol(text, nullptr, 0) : otherwise;
}

struct Plant {
  std::string function;
  long nth = 0;
  int code = 0;
  bool lost = false;  // the device is lost with that call
};

// "cudaMalloc:3:2,cudaEventQuery:10:719:lost": function, which call, code, and whether the device is lost with it.
inline std::vector<Plant> planted(const char* name) {
  std::vector<Plant> plants;
  const char* text = std::getenv(name);
  std::stringstream all(text ? text : "");
  for (std::string entry; std::getline(all, entry, ',');) {
    std::stringstream parts(entry);
    std::string function, nth, code, rest;
    std::getline(parts, function, ':') && std::getline(parts, nth, ':') && std::getline(parts, code, ':');
    std::getline(parts, rest, ':');
    if (function.empty() || nth.empty() || code.empty() || !(rest.empty() || rest == "lost")) {
      std::fprintf(stderr, "stand-in: %s=%s is not understood\n", name, text);
      std::abort();
    }
    plants.push_back({function, std::atol(nth.c_str()), std::atoi(code.c_str()), rest == "lost"});
  }
  return plants;
}

}  // namespace standin
