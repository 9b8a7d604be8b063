-- Publishes rows of reply events, for all jobs of a flush together. Each row stands alone.
-- KEYS[1]  the queue's prefix
-- ARGV[1]  worker
-- ARGV[2]  the rows, one after the other in one flat JSON array, 7 texts each: kind, id, epoch, from, to, event,
--          cached_tokens ('' but for a first start)
--          kind `tokens`: to > from, entry id <to>-0.   kind `mark`: to = from = n, entry id <n>-<epoch>
-- Returns  a line per row but those whose answer is OK with n = to: its index from 0, status, n, and after an ERR its text
--   OK       it is there (also when it had been there before)
--   CANCEL   it is there, and the producer wants the job cancelled
--   FENCED   the job is not this worker's any more: drop it silently
--   GAP      Redis has n tokens: send again from n
--   ERR      the row cannot be written
-- Every token of every job comes through here, and what Lua does costs more than the commands: hence one argument, texts
-- that need no conversion, few tables and closures, and no answer where there is nothing to say.

local WIDTH = 7
local EXISTS_KEYS = 1000 -- at a time: Lua's stack has room for 8,000 arguments
local worker, rows = ARGV[1], cjson.decode(ARGV[2])

local function begin(out, entry, event)
  redis.call('XADD', out, entry, 'd', event)
  redis.call('PEXPIRE', out, DAY_MS) -- from then on each renewal does
end

-- What happened to an XADD of `entry`: nil (written), or the token count that the stream has beyond it.
local function write(id, entry, event)
  local out, problem = base .. 'out:' .. id, nil
  local ok, added = pcall(redis.call, 'XADD', out, 'NOMKSTREAM', entry, 'd', event)
  if not ok then
    problem = caught(added)
  elseif not added then
    problem = guarded(begin, out, entry, event)
  end
  if not problem then return nil end
  if not problem:find('equal or smaller', 1, true) then error(problem, 0) end
  return last_of(id)
end

local function mark(n, id, epoch, to, event, cached)
  if tonumber(n) < tonumber(to) then return 'GAP', n end -- with more tokens than that it was written before them
  write(id, to .. '-' .. epoch, event)
  if cached ~= '' then redis.call('HSETNX', base .. 'job:' .. id, 'cached_tokens', cached) end
  return 'OK', n
end

local function tokens(n, attempts, id, from, to, event)
  if n == to then return 'OK', n end
  if n ~= from then return 'GAP', n end
  local job, beyond = base .. 'job:' .. id, write(id, to .. '-0', event)
  if beyond then -- the record is older than the reply (a failover): the reply is the truth
    redis.call('HSET', job, 'n', beyond)
    return beyond == tonumber(to) and 'OK' or 'GAP', beyond
  end
  redis.call('HSET', job, 'n', to)
  if attempts ~= '0' then -- a new token acquits a suspect
    redis.call('HSET', job, 'attempts', 0)
    end_trial(worker, id)
  end
  return 'OK', to
end

-- Whether a producer wants any of the jobs cancelled: one call for all of them, because hardly ever one does.
local function any_cancelled()
  local keys = {}
  for i = 2, #rows, WIDTH do keys[#keys + 1] = base .. 'cancel:' .. rows[i] end
  for first = 1, #keys, EXISTS_KEYS do
    if redis.call('EXISTS', unpack(keys, first, math.min(first + EXISTS_KEYS - 1, #keys))) > 0 then return true end
  end
  return false
end

local look = any_cancelled()

local function publish(i)
  local kind, id, epoch, from, to, event, cached = unpack(rows, i, i + WIDTH - 1)
  local n, attempts = fence(id, epoch, worker)
  if not n then return 'FENCED', 0 end
  local status
  if kind == 'mark' then
    status, n = mark(n, id, epoch, to, event, cached)
  else
    status, n = tokens(n, attempts, id, from, to, event)
  end
  if look and status == 'OK' and redis.call('EXISTS', base .. 'cancel:' .. id) == 1 then status = 'CANCEL' end
  return status, n
end

local answers = {}
for i = 1, #rows, WIDTH do
  local ok, status, n = pcall(publish, i)
  if status ~= 'OK' or n ~= rows[i + 4] then
    local line = ok and ('%s %d'):format(status, n) or 'ERR 0 ' .. caught(status):gsub('%c', ' ')
    answers[#answers + 1] = ('%d %s'):format((i - 1) / WIDTH, line)
  end
end
return table.concat(answers, '\n')
