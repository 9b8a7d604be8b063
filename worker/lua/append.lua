-- Publishes rows of reply events, for all jobs of a flush together. Each row stands alone.
-- KEYS[1]  the queue's prefix
-- ARGV[1]  worker
-- ARGV[2]  the rows as a JSON array (one argument instead of hundreds: they cost more than what is done with them), each
--          an array of kind, id, epoch, from, to, event (a string), cached_tokens ('' but for a first start)
--          kind `tokens`: to > from, entry id <to>-0.   kind `mark`: to = from = n, entry id <n>-<epoch>
-- Returns  a line per row: status, n and, after an ERR, its text
--   OK       it is there (also when it had been there before)
--   CANCEL   it is there, and the producer wants the job cancelled
--   FENCED   the job is not this worker's any more: drop it silently
--   GAP      Redis has n tokens: send again from n
--   ERR      the row cannot be written

local EXISTS_KEYS = 1000 -- at a time: Lua's stack has room for 8,000 arguments
local worker = ARGV[1]

-- What happened to an XADD of `entry`: nil (written), or the token count that the stream has beyond it.
local function write(id, entry, event)
  local out = base .. 'out:' .. id
  local problem = guarded(function()
    if redis.call('XADD', out, 'NOMKSTREAM', entry, 'd', event) then return end
    redis.call('XADD', out, entry, 'd', event)
    redis.call('PEXPIRE', out, DAY_MS) -- from then on each renewal does
  end)
  if problem and not problem:find('equal or smaller', 1, true) then error(problem, 0) end
  return problem and last_of(id)
end

local function mark(row, record)
  if record.n < row.to then return 'GAP', record.n end -- with more tokens than that it was written before them
  write(row.id, row.to .. '-' .. row.epoch, row.event)
  if row.cached ~= '' then redis.call('HSETNX', base .. 'job:' .. row.id, 'cached_tokens', row.cached) end
  return 'OK', record.n
end

local function tokens(row, record)
  if record.n == row.to then return 'OK', record.n end
  if record.n ~= row.from then return 'GAP', record.n end
  local beyond = write(row.id, row.to .. '-0', row.event)
  if beyond then -- the record is older than the reply (a failover): the reply is the truth
    redis.call('HSET', base .. 'job:' .. row.id, 'n', beyond)
    return beyond == row.to and 'OK' or 'GAP', beyond
  end
  redis.call('HSET', base .. 'job:' .. row.id, 'n', row.to)
  if record.attempts > 0 then -- a new token acquits a suspect
    redis.call('HSET', base .. 'job:' .. row.id, 'attempts', 0)
    end_trial(worker, row.id)
  end
  return 'OK', row.to
end

-- Whether a producer wants any of the jobs cancelled: one call for all of them, because hardly ever one does.
local function any_cancelled(rows)
  local keys = {}
  for i, row in ipairs(rows) do keys[i] = base .. 'cancel:' .. row.id end
  for first = 1, #keys, EXISTS_KEYS do
    if redis.call('EXISTS', unpack(keys, first, math.min(first + EXISTS_KEYS - 1, #keys))) > 0 then return true end
  end
  return false
end

local rows = cjson.decode(ARGV[2])
for i, row in ipairs(rows) do
  rows[i] = {kind = row[1], id = row[2], epoch = tostring(row[3]), from = row[4], to = row[5], event = row[6],
             cached = row[7]}
end
local look = any_cancelled(rows)

local function publish(row)
  local record = fence(row.id, row.epoch, worker)
  if not record then return 'FENCED', 0 end
  local kind = row.kind == 'mark' and mark or tokens
  local status, n = kind(row, record)
  if look and status == 'OK' and redis.call('EXISTS', base .. 'cancel:' .. row.id) == 1 then status = 'CANCEL' end
  return status, n
end

local answers = {}
for i, row in ipairs(rows) do answers[i] = answer(publish, row) end
return table.concat(answers, '\n')
