// Memory whose views have ended; see late_views.cpp.
#pragma once

namespace mykv {

// Gives the memory back, with Python's lock. Python calls it soon on its main thread; call it before memory is asked
// for.
void drop_returned_memory();

}  // namespace mykv
