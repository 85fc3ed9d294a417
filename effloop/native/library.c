/* What the library was compiled from. */

#include "export.h"

EXPORT const char *effloop_sources(void) { return EFFLOOP_SOURCES; }
