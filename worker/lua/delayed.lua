-- Delayed jobs, for the claim script: worker/scripts.py puts this text between endings.lua and claim.lua.

local FIELDS = {'id', 'body', 'deadline', 'not_before', 'tenant', 'affinity', 'traceparent', 'v'}

-- Takes an entry out of its stream until its time has come; the body waits in the job's record.
local function park(item, not_before)
  local job = base .. 'job:' .. item.id
  redis.call('ZADD', base .. 'delayed', not_before, item.id) -- first: it may be of another type
  redis.call('HSET', job, 'state', 'delayed', 'entry', item.here)
  for _, name in ipairs(FIELDS) do
    if item.fields[name] then redis.call('HSET', job, 'entry:' .. name, item.fields[name]) end
  end
  redis.call('PEXPIRE', job, not_before - now + DAY_MS)
  drop(item.stream, item.entry)
  note('delayed', item.id)
end

-- The entry of a parked job as it was, or nil when the job is parked no more.
local function parked(id)
  local record, fields = map_of(redis.call('HGETALL', base .. 'job:' .. id)), {}
  if record.state ~= 'delayed' then return nil end
  for _, name in ipairs(FIELDS) do fields[name] = record['entry:' .. name] end
  local stream, entry = record.entry:match('^([^|]+)|(.+)$')
  return {id = id, stream = stream, entry = entry, here = record.entry, fields = fields, record = {},
          submitted = tonumber(entry:match('^%d+'))}
end

-- Adds a parked job to its stream again, as a new entry that keeps its place as the one of its id.
local function promote_one(item)
  local job, args = base .. 'job:' .. item.id, {}
  for name, value in pairs(item.fields) do
    args[#args + 1] = name
    args[#args + 1] = value
  end
  local entry = redis.call('XADD', base .. item.stream, '*', unpack(args))
  for name in pairs(item.fields) do redis.call('HDEL', job, 'entry:' .. name) end
  redis.call('HDEL', job, 'state')
  redis.call('HSET', job, 'entry', item.stream .. '|' .. entry)
  redis.call('PEXPIRE', job, DAY_MS)
  note('promoted', item.id)
end

-- Promotes a job that is due, or ends it where that cannot be: its stream or its record is not what it should be.
local function promote_or_end(id)
  local item = {id = id, stream = '', entry = '0-0', fields = {id = id}, record = {}}
  local problem = guarded(function()
    local found = parked(id)
    if not found then return end
    item = found
    promote_one(found)
  end)
  if problem then guarded(give_up, item, problem) end
end

-- Promotes what is due, at most 100 jobs a call. What is no parked job (any more) leaves the set.
local function promote()
  local due = redis.call('ZRANGE', base .. 'delayed', '-inf', now, 'BYSCORE', 'LIMIT', 0, 100)
  for _, id in ipairs(due) do
    promote_or_end(id)
    redis.call('ZREM', base .. 'delayed', id)
  end
  if #due > 0 then ring() end
end
