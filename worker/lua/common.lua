-- What all scripts share; worker/scripts.py puts this text before each of them.
-- KEYS[1] is always the queue's prefix "gllm:{<queue>}:"; every other key is built from it, so all lie in one slot.
-- A job hash without `state` belongs to a job that waits in its stream (released, or promoted after a delay).

local GROUP = 'workers'
local RELEASED = '-released'
local DAY_MS = 24 * 3600 * 1000
local REPLY_LIFE_MS = 10 * 60 * 1000
local TERMINAL = '9007199254740991-0'
local MAX_TOKENS = 2147483647 -- of a reply; a larger entry id is a clock's, from an XADD * by somebody else
local MAX_DEAD_BODY = 64 * 1024
local TRANSIENT = {OOM = true, MISCONF = true, READONLY = true, LOADING = true, MASTERDOWN = true, CLUSTERDOWN = true,
                   TRYAGAIN = true, NOREPLICAS = true}

local base = KEYS[1]

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function text_of(err)
  local text = type(err) == 'table' and err.err or tostring(err)
  return (text:gsub('^%-', ''))
end

-- The text of an error that was caught. What the whole server suffers from is raised again: it is never the fault of one
-- row, and it can only come up before the script's first write, so nothing is half done.
local function caught(err)
  local text = text_of(err)
  if TRANSIENT[text:match('^%u+') or ''] then error({err = text}, 0) end
  return text
end

-- Runs f and returns the text of what it raised, or nil.
local function guarded(f, ...)
  local ok, err = pcall(f, ...)
  if not ok then return caught(err) end
end

-- A script's answer about one row: f returns status, n and, for an ERR, its text; or it raises.
local function answer(f, ...)
  local ok, status, n, text = pcall(f, ...)
  if not ok then status, n, text = 'ERR', 0, caught(status) end
  local line = ('%s %d'):format(status, n)
  return text and line .. ' ' .. text:gsub('%c', ' ') or line
end

-- A command on one of the queue's own keys. Redis' text for one of another type does not say which key it is: ours does.
local function own(command, key, ...)
  local ok, reply = pcall(redis.call, command, base .. key, ...)
  if ok then return reply end
  error({err = (text_of(reply):gsub('^%u+', '%0 ' .. base .. key .. ':', 1))}, 0)
end

-- A value as it may stand in a message: short, printable, and so always valid JSON.
local function shown(value)
  return "'" .. (tostring(value):sub(1, 64):gsub('[^\32-\126]', '?')) .. "'"
end

local function map_of(flat)
  local map = {}
  for i = 1, #flat, 2 do map[flat[i]] = flat[i + 1] end
  return map
end

local function drop(stream, entry)
  redis.call('XACK', base .. stream, GROUP, entry)
  redis.call('XDEL', base .. stream, entry)
end

local function ring()
  guarded(function() redis.call('XADD', base .. 'bell', 'MAXLEN', 1, '*', 'r', '1') end)
end

-- A worker that was taken for dead speaks: the charge for its death is taken back. Not the first one: the job is a
-- suspect by now, and remains it until it has a new token.
local function take_back(id, worker)
  local job = base .. 'job:' .. id
  local got = redis.call('HMGET', job, 'charged', 'attempts')
  if got[1] ~= worker or tonumber(got[2] or '0') < 2 then return end
  redis.call('HINCRBY', job, 'attempts', -1)
  redis.call('HDEL', job, 'charged')
end

-- The fence: the job's n and attempts, as texts, if it is running under exactly this epoch and this worker, else nil.
-- Raises for an n that is no count: no answer could say it, and who is told to go on from there would never get on.
local function fence(id, epoch, worker)
  local got = redis.call('HMGET', base .. 'job:' .. id, 'state', 'epoch', 'worker', 'n', 'attempts')
  if got[1] ~= 'running' or got[2] ~= epoch or got[3] ~= worker then
    take_back(id, worker)
    return nil
  end
  local n = got[4] or '0'
  if #n > 16 or not n:find('^%d+$') then error({err = 'BROKEN job:' .. id .. ' has n ' .. shown(n)}, 0) end
  return n, got[5] or '0'
end

local function end_trial(worker, id)
  local key = base .. 'worker:' .. worker
  if redis.call('HGET', key, 'trial') == id then redis.call('HDEL', key, 'trial') end
end

-- The last entry id of a reply stream as token count and sequence number, or nil. Raises for no stream, or not ours.
local function last_of(id)
  local last = redis.call('XREVRANGE', base .. 'out:' .. id, '+', '-', 'COUNT', 1)[1]
  if not last then return nil end
  local n, sequence = last[1]:match('^(%d+)-(%d+)$')
  if tonumber(n) > MAX_TOKENS and last[1] ~= TERMINAL then
    error({err = 'FOREIGN out:' .. id .. ' ends with ' .. last[1] .. ', which no worker wrote'}, 0)
  end
  return tonumber(n), tonumber(sequence), last[1]
end

-- Waiting are the entries that nobody holds: not yet delivered, or released. Returns their number, and how many of them
-- are not yet delivered: the group's lag, but known also after somebody deleted entries.
local function waiting(stream)
  local pending = redis.call('XPENDING', base .. stream, GROUP)
  local new = redis.call('XLEN', base .. stream) - pending[1]
  local count = new
  for _, consumer in ipairs(pending[4] or {}) do
    if consumer[1] == RELEASED then count = count + tonumber(consumer[2]) end
  end
  return count, new
end

-- Writes a dead letter. `letter`: id, reason, error, attempts, worker, stream, fields (of the entry).
local function bury(letter)
  local fields, body = letter.fields, letter.fields.body or ''
  -- 129: one character more than an id may have, so that a cut one is never taken for another job's
  local args = {'id', tostring(fields.id or ''):sub(1, 129), 'reason', letter.reason, 'attempts', letter.attempts or 0,
                'error', letter.error or '', 'worker', letter.worker or '', 'stream', letter.stream}
  local function add(name, value)
    args[#args + 1] = name
    args[#args + 1] = value
  end
  if #body <= MAX_DEAD_BODY then
    add('body', body)
  else
    add('body_bytes', #body)
    add('body_sha1', redis.sha1hex(body))
  end
  for _, name in ipairs({'traceparent', 'tenant', 'affinity'}) do
    if fields[name] then add(name, fields[name]:sub(1, 1024)) end
  end
  redis.call('XADD', base .. 'dead', 'MAXLEN', '~', 1000, '*', unpack(args))
end

local function has_terminal(out) return #redis.call('XRANGE', out, TERMINAL, TERMINAL) > 0 end

-- Ends a job: terminal event (nil: it is there), record, entry, cancel wish, in one go. Returns the text of an error
-- that kept the event from being written, or nil; the server's refusal of a second terminal is none.
local function end_job(id, event, stream, entry, worker)
  local job, out = base .. 'job:' .. id, base .. 'out:' .. id
  local problem = event and guarded(function() redis.call('XADD', out, TERMINAL, 'd', event) end)
  if problem and problem:find('equal or smaller', 1, true) and has_terminal(out) then problem = nil end
  redis.call('PEXPIRE', out, REPLY_LIFE_MS)
  problem = guarded(function()
    redis.call('HINCRBY', job, 'epoch', 1)
    redis.call('HSET', job, 'state', 'ended', 'entry', stream .. '|' .. entry)
    redis.call('PEXPIRE', job, DAY_MS)
  end) or problem
  redis.call('DEL', base .. 'cancel:' .. id)
  end_trial(worker, id)
  drop(stream, entry)
  return problem
end

-- After a downtime of the server every pending entry looks idle, also those of healthy workers. So when the newest
-- heartbeat is older than a lease, nothing is reclaimed for one lease. Returns whether that time is now.
local function quiet(now, lease)
  local newest = own('ZREVRANGE', 'workers', 0, 0, 'WITHSCORES')[2]
  if not newest or tonumber(newest) < now - lease then
    own('HSET', 'meta', 'quiet_from', now, 'quiet_until', now + lease)
    return true
  end
  local from, till = unpack(own('HMGET', 'meta', 'quiet_from', 'quiet_until'))
  -- not before its beginning: else a clock that was set back would keep it going for as long
  return tonumber(from or '0') <= now and tonumber(till or '0') > now
end
