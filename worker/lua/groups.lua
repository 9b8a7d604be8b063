-- What waits in a job stream, for the scripts that tell of it: worker/scripts.py puts this text after common.lua.

local function group_of(stream)
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', base .. stream)) do
    local group = map_of(flat)
    if group.name == GROUP then return group end
  end
end

-- The oldest entry that nobody holds: the first one not yet delivered, or a released one before it; '' for none.
local function oldest_of(stream, group)
  local start = group and '(' .. group['last-delivered-id'] or '-'
  local new = redis.call('XRANGE', base .. stream, start, '+', 'COUNT', 1)[1]
  local released = group and redis.call('XPENDING', base .. stream, GROUP, '-', '+', 1, RELEASED)[1]
  return released and released[1] or new and new[1] or ''
end
