/*
 * check.h - checks that the operators and the layer of the public interface share.
 */
#ifndef DPL_API_CHECK_H
#define DPL_API_CHECK_H

#include "base/base.h"

dpl_status dpl_check_rule(const dpl_route_rule *rule); // DPL_EINVAL names the field
// DPL_ENOSPC where ws_bytes < needed, DPL_EINVAL where it is not aligned.
dpl_status dpl_check_workspace(const void *ws, size_t ws_bytes, size_t needed);

#endif
