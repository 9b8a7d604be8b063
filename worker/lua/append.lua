-- Publishes rows of reply events, for all jobs of a flush together. Each row stands alone.
-- KEYS[1]  the queue's prefix
-- ARGV[1]  worker; then 7 per row: kind, id, epoch, from, to, event, cached_tokens ('' but for a first start)
--          kind `tokens`: to > from, entry id <to>-0.   kind `mark`: to = from = n, entry id <n>-<epoch>
-- Returns  status and n, flat, per row:
--   OK       it is there (also when it had been there before)
--   CANCEL   it is there, and the producer wants the job cancelled
--   FENCED   the job is not this worker's any more: drop it silently
--   GAP      Redis has n tokens: send again from n
--   ERR <text>  the row cannot be written

local worker = ARGV[1]

-- What happened to an XADD of `entry`: nil (written), or the token count that the stream has beyond it.
local function write(id, entry, event)
  local out = base .. 'out:' .. id
  local problem = guarded(function() redis.call('XADD', out, entry, 'd', event) end)
  if problem and not problem:find('equal or smaller', 1, true) then error(problem, 0) end
  redis.call('PEXPIRE', out, DAY_MS)
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

local function publish(row)
  local record = fence(row.id, row.epoch, worker)
  if not record then return 'FENCED', 0 end
  local kind = row.kind == 'mark' and mark or tokens
  local status, n = kind(row, record)
  if status == 'OK' and redis.call('EXISTS', base .. 'cancel:' .. row.id) == 1 then status = 'CANCEL' end
  return status, n
end

local answers = {}
for i = 2, #ARGV, 7 do
  local row = {kind = ARGV[i], id = ARGV[i + 1], epoch = ARGV[i + 2], from = tonumber(ARGV[i + 3]),
               to = tonumber(ARGV[i + 4]), event = ARGV[i + 5], cached = ARGV[i + 6]}
  local status, n
  local problem = guarded(function() status, n = publish(row) end)
  answers[#answers + 1] = problem and 'ERR ' .. problem or status
  answers[#answers + 1] = n or 0
end
return answers
