-- Looks at a whole queue at one moment, for people and autoscalers. Writes nothing; works on a replica, too.
-- KEYS[1]  the queue's prefix
-- Returns  {now in ms, meta, delayed, due, dead, workers, streams}
--   meta     version, shards, model, quiet_until, '' where absent; as they are, whatever that is
--   delayed  number of delayed jobs; due: when the next one is, in ms, or ''
--   dead     number of dead letters; workers: number of heartbeats
--   streams  per job stream: name, entries, waiting, lag (-1: the server does not know), last id delivered, entry id of
--            the oldest that waits ('' none), problem ('' none), then name and pending entries of each consumer that
--            has any. Without a group all entries wait.
-- Error words: none of its own. What cannot be read, because a key is of another type, counts 0 or has a problem.

local MAX_SHARDS = 256 -- so that nonsense in meta cannot block the server

-- As `guarded`, for what a queue may suffer from; what this user may not do is raised: 0 jobs would be a lie.
local function tolerated(f)
  local problem = guarded(f)
  if problem and problem:find('^ERR ') then error({err = problem}, 0) end
  return problem
end

local function counted(command, name)
  local count = 0
  tolerated(function() count = redis.call(command, base .. name) end)
  return count
end

local function look(stream)
  local row = {stream, 0, 0, -1, '0-0', '', ''}
  row[7] = tolerated(function()
    if redis.call('EXISTS', base .. stream) == 0 then error('there is no such stream', 0) end
    row[2] = redis.call('XLEN', base .. stream)
    row[3] = row[2]
    local group = group_of(stream)
    row[6] = oldest_of(stream, group)
    if not group then error('it has no group ' .. GROUP, 0) end
    row[3], row[4], row[5] = waiting(stream), group.lag or -1, group['last-delivered-id']
    for _, consumer in ipairs(redis.call('XPENDING', base .. stream, GROUP)[4] or {}) do
      row[#row + 1] = consumer[1]
      row[#row + 1] = tonumber(consumer[2])
    end
  end) or ''
  return row
end

local meta = {false, false, false, false}
tolerated(function() meta = redis.call('HMGET', base .. 'meta', 'version', 'shards', 'model', 'quiet_until') end)
for i = 1, 4 do meta[i] = meta[i] or '' end
local due
tolerated(function() due = redis.call('ZRANGE', base .. 'delayed', 0, 0, 'WITHSCORES')[2] end)
local streams = {}
for _, priority in ipairs({'high', 'normal', 'low'}) do
  for shard = 0, math.max(1, math.min(MAX_SHARDS, tonumber(meta[2]) or 1)) - 1 do
    streams[#streams + 1] = look('jobs:' .. priority .. ':' .. shard)
  end
end
local delayed, dead, workers = counted('ZCARD', 'delayed'), counted('XLEN', 'dead'), counted('ZCARD', 'workers')
return {now_ms(), meta, delayed, due or '', dead, workers, streams}
