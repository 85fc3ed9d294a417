#ifndef EFFLOOP_EXPORT_H
#define EFFLOOP_EXPORT_H

/* All else is hidden (-fvisibility=hidden). */
#define EXPORT __attribute__((visibility("default")))

#endif
