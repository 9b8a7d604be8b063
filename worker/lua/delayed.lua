-- Delayed jobs, for the claim script: worker/scripts.py puts this text between common.lua and claim.lua.
-- `note(kind, id, text)` is the claim's.

-- Takes an entry out of its stream until its time has come; the body waits in the job's record.
local function park(item, not_before, now, note)
  local job = base .. 'job:' .. item.id
  redis.call('HSET', job, 'state', 'delayed', 'entry', item.here)
  for name, value in pairs(item.fields) do redis.call('HSET', job, 'entry:' .. name, value) end
  redis.call('PEXPIRE', job, not_before - now + DAY_MS)
  redis.call('ZADD', base .. 'delayed', not_before, item.id)
  drop(item.stream, item.entry)
  note('delayed', item.id)
end

-- Adds a parked job to its stream again, as a new entry that keeps its place as the one of its id.
local function promote_one(id, note)
  local job = base .. 'job:' .. id
  local record = map_of(redis.call('HGETALL', job))
  if record.state ~= 'delayed' then return end
  local args = {}
  for name, value in pairs(record) do
    local field = name:match('^entry:(.*)$')
    if field then
      args[#args + 1] = field
      args[#args + 1] = value
      redis.call('HDEL', job, name)
    end
  end
  local stream = record.entry:match('^[^|]+')
  local entry = redis.call('XADD', base .. stream, '*', unpack(args))
  redis.call('HDEL', job, 'state')
  redis.call('HSET', job, 'entry', stream .. '|' .. entry)
  redis.call('PEXPIRE', job, DAY_MS)
  note('promoted', id)
end

-- Promotes what is due, at most 100 jobs a call. What is no parked job (any more) leaves the set.
local function promote(now, note)
  local due = redis.call('ZRANGE', base .. 'delayed', '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)
  for _, id in ipairs(due) do
    local problem = guarded(promote_one, id, note)
    if problem then note('stream', id, 'delayed: ' .. problem) end
    redis.call('ZREM', base .. 'delayed', id)
  end
  if #due > 0 then ring() end
end
